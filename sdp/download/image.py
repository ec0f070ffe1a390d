"""Turns fetched bytes into the stored image: decodes all, checks it against the rules, resizes and encodes it."""

import hashlib
import math
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import simplejpeg

from sdp.config.download import FiltersConfig, ImageConfig
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome
from sdp.imaging import (
    WEB_FORMATS,
    Box,
    Header,
    Image,
    ImageError,
    OnHeader,
    Pixels,
    centre_box,
    cut,
    decode,
    has_room,
    lacks_memory,
    read_header,
)
from sdp.sandbox.child import CPU_S_A_PIXEL

_KEPT_CPU_S = 0.5
"""CPU seconds, beyond those for its pixels, in which an image that is kept as it is must be decoded: later jobs decode
it without a sandbox, and training in each epoch."""
ROOM = 1.15
"""Least size of a decoded JPEG, as a multiple of the target size. Below it, the decoder's own scaling is visible."""
LEAST_SIDE = 8
"""Pixels of the shorter side below which an image fails: it is a tracking pixel."""
ABSURD_ASPECT = 100.0
"""Ratio of the longer side to the shorter from which an image is filtered whatever the configuration: rulers, borders
and scroll bars have it."""
_SHA256 = re.compile("[0-9a-f]{64}")
_LONGEST_SIDE = 65_500
"""The greatest width or height of a JPEG, in pixels."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The configuration's rules for images. Sides are those of the upright image."""

    image: ImageConfig
    filters: FiltersConfig


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking an image's bytes."""

    outcome: str
    reason: str | None = None
    detail: str | None = None
    data: bytes | None = None
    """The encoded image; None if the fetched bytes are kept as they are, or refused."""
    width: int = 0
    height: int = 0
    original_width: int = 0
    original_height: int = 0
    sha256: str | None = None
    """Hash of the fetched bytes."""


def examine(rules: ImageRules, data: memoryview, on_header: OnHeader) -> tuple[dict[str, Any], bytes]:
    """Check an image in a decoder process."""
    checked = check(data, rules, on_header)
    return {**asdict(checked), "data": checked.data is not None}, checked.data or b""


def examined(reply: dict[str, Any], data: bytes | memoryview) -> Checked:
    """Return the result in a decoder's reply, which may be forged by an image that has taken the decoder over."""
    with suppress(TypeError, ValueError):
        checked = Checked(**{**reply, "data": bytes(data) if reply.get("data") else None})
        Outcome(0, checked.outcome, checked.reason)
        sides = (checked.width, checked.height, checked.original_width, checked.original_height)
        sound = all(type(side) is int and 0 <= side < 1 << 31 for side in sides)
        sound = sound and isinstance(checked.detail, str | None)
        if sound and (checked.outcome != WRITTEN or _SHA256.fullmatch(checked.sha256 or "")):
            return checked
    return Checked(FAILED, "crashed", "its decoder sent a malformed reply")


def check(data: bytes | memoryview, rules: ImageRules, on_header: OnHeader = lambda _: None) -> Checked:
    """Decode, check and convert one image; any bytes give a result, and nothing is raised."""
    image_rules = rules.image
    digest = hashlib.sha256(data).hexdigest()
    header: Header | None = None
    try:
        header = read_header(data, WEB_FORMATS)
        on_header(header)
        if (refused := _refusal(header, rules)) is not None:
            return Checked(*refused, f"{header.width} × {header.height}", sha256=digest)
        if image_rules.size is None:
            began = time.process_time()
            decode(data, header=header)
            took = time.process_time() - began
            if took > _KEPT_CPU_S + header.width * header.height * CPU_S_A_PIXEL:
                cause = f"decoding takes {took:.1f} s of CPU time, too long to keep it as it is"
                raise ImageError("undecodable", cause)
            size = (header.width, header.height)
            return Checked(WRITTEN, None, None, None, *size, *size, digest)
        image = decode(data, min_side=math.ceil(image_rules.size * ROOM), header=header)
        pixels = resized(image, image_rules.size, crop=image_rules.crop == "center", enlarge=image_rules.enlarge)
        height, width = pixels.shape[:2]
        if max(height, width) > _LONGEST_SIDE:
            raise ImageError("too_many_pixels", f"{width} × {height} pixels, too many for a JPEG")
        encoded = encode(pixels, image_rules.quality)
        return Checked(WRITTEN, None, None, encoded, width, height, image.width, image.height, digest)
    except Exception as error:  # noqa: BLE001 (corrupt bytes make codecs raise any exception)
        reason, detail = "undecodable", f"{type(error).__name__}: {error}"
        if isinstance(error, ImageError):
            reason, detail = error.reason, error.detail
        is_cramped = reason == "undecodable" and header is not None and not has_room(header.width, header.height)
        if is_cramped or lacks_memory(error):
            what = "its header" if header is None else f"{header.width} × {header.height} pixels of {header.format}"
            reason, detail = "no_memory", f"no memory for {what} within its limit"
        return Checked(FAILED, reason, detail, sha256=digest)


def resized(image: Image, size: int, *, crop: bool, enlarge: bool) -> Pixels:
    """Resize the shorter side to `size`, and return all of the image or its centre square."""
    width, height = image.width, image.height
    shorter = min(width, height)
    size = size if enlarge else min(size, shorter)
    if crop:
        return cut(image, centre_box(width, height), size, size)
    scaled = (max(size, round(side * size / shorter)) for side in (width, height))
    return cut(image, Box(0, 0, width, height), *scaled)


def encode(pixels: Pixels, quality: int) -> bytes:
    return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))


def _refusal(header: Header, rules: ImageRules) -> tuple[str, str] | None:
    """Return the outcome and reason of an image that need not be decoded; None for any other."""
    shorter, longer = sorted((header.width, header.height))
    if shorter < LEAST_SIDE:
        return FAILED, "too_small"
    if rules.filters.min_side is not None and shorter < rules.filters.min_side:
        return FILTERED, "min_size"
    if longer > min(rules.filters.max_aspect or ABSURD_ASPECT, ABSURD_ASPECT) * shorter:
        return FILTERED, "aspect"
    return None
