"""From bytes to what is stored: an image decoded whole, checked against the rules, resized and encoded."""

import hashlib
import io
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import cv2
import numpy as np
import simplejpeg
from PIL import Image as Pillow

from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome
from sdp.imaging import (
    FORMATS,
    WEB_FORMATS,
    Header,
    Image,
    ImageError,
    Pixels,
    decode,
    has_room,
    lacks_memory,
    read_header,
)

_ONE_SAMPLE = 2.31
"""Up to this reduction, the most that is left after a JPEG was scaled while it was decoded, one bilinear sample of each
pixel will do: 47 dB against the mean of the area on photographs, where JPEG's own loss at quality 95 is 42 dB."""
ROOM = 1.15
"""A JPEG is decoded to no less than so many times the size: nearer to it, what the decoder scales by shows most."""


ABSURD_ASPECT = 100.0
"""Longer side to shorter: rulers, borders and scroll bars. Nothing that is cut from such an image is a picture."""
_GZIP = b"\x1f\x8b"
_SHA256 = re.compile("[0-9a-f]{64}")
_LONGEST_SIDE = {"jpeg": 65_500, "webp": 16_383}
"""Pixels that a format has room for."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """What is asked of an image, and what is made of it. Sides are those that a viewer sees."""

    size: int | None = None
    """Pixels of the shorter side; None keeps the bytes as they came."""
    crop: bool = False
    enlarge: bool = False
    format: Literal["jpeg", "webp"] = "jpeg"
    quality: int = 95
    max_bytes: int = 50_000_000
    max_pixels: int = 100_000_000
    tiff: bool = False
    least_side: int = 1
    """An image with a smaller side is no picture: a failure."""
    min_side: int | None = None
    """The filter's: an image with a smaller side is left out."""
    max_aspect: float | None = None
    """The filter's, too: longer side to shorter. Beyond ABSURD_ASPECT an image is left out whatever the filter says."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of an image's bytes."""

    outcome: str
    reason: str | None = None
    detail: str | None = None
    data: bytes | None = None
    """The encoded image; None where the bytes are kept as they came, or refused."""
    width: int = 0
    height: int = 0
    original_width: int = 0
    original_height: int = 0
    sha256: str | None = None
    """Of the bytes as they came."""


def examine(rules: ImageRules, data: memoryview, seen: Callable[[Header], None]) -> tuple[dict[str, Any], bytes]:
    """Check an image in a decoder."""
    checked = check(data, rules, seen)
    return {**asdict(checked), "data": checked.data is not None}, checked.data or b""


def examined(reply: dict[str, Any], data: bytes | memoryview) -> Checked:
    """Return what a decoder's reply holds, which an image that has taken the decoder over may have written."""
    try:
        checked = Checked(**{**reply, "data": bytes(data) if reply.get("data") else None})
        Outcome(0, checked.outcome, checked.reason)
        sides = (checked.width, checked.height, checked.original_width, checked.original_height)
        sound = all(type(side) is int and 0 <= side < 1 << 31 for side in sides)
        sound = sound and isinstance(checked.detail, str | None)
        if sound and (checked.outcome != WRITTEN or _SHA256.fullmatch(checked.sha256 or "")):
            return checked
    except (TypeError, ValueError):
        pass
    return Checked(FAILED, "crashed", "its decoder sent a malformed reply")


def check(data: bytes | memoryview, rules: ImageRules, seen: Callable[[Header], None] = lambda _: None) -> Checked:
    """Decode, check and convert one image. Whatever the bytes are, it returns; it raises nothing.

    `seen` is called with the header, before anything is decoded.
    """
    digest = hashlib.sha256(data).hexdigest()
    header: Header | None = None
    unpacked: bytes | None = None
    try:
        if bytes(data[:2]) == _GZIP:
            data = unpacked = _gunzipped(data, rules.max_bytes)
            digest = hashlib.sha256(data).hexdigest()
        header = read_header(data, rules.max_pixels, FORMATS if rules.tiff else WEB_FORMATS)
        seen(header)
        refused = _refused(header, rules)
        if refused is not None:
            outcome, reason = refused
            return Checked(outcome, reason, f"{header.width} × {header.height}", sha256=digest)
        if rules.size is None:
            # Nobody needs the pixels; of a JPEG every byte is read at any scale.
            decode(data, min_side=1, max_pixels=rules.max_pixels)
            size = (header.width, header.height)
            return Checked(WRITTEN, None, None, unpacked, *size, *size, digest)
        image = decode(data, min_side=math.ceil(rules.size * ROOM), max_pixels=rules.max_pixels)
        pixels = resized(image, rules.size, crop=rules.crop, enlarge=rules.enlarge)
        if max(pixels.shape[:2]) > _LONGEST_SIDE[rules.format]:
            raise ImageError(
                "too_many_pixels",
                f"{pixels.shape[1]} × {pixels.shape[0]} pixels, more than {rules.format} has room for",
            )
        encoded = encode(pixels, rules.format, rules.quality)
        height, width = pixels.shape[:2]
        return Checked(WRITTEN, None, None, encoded, width, height, image.width, image.height, digest)
    except Exception as error:  # noqa: BLE001 (what corrupt bytes make a codec raise is not to be foreseen)
        reason, detail = "undecodable", f"{type(error).__name__}: {error}"
        if isinstance(error, ImageError):
            reason, detail = error.reason, error.detail
        if lacks_memory(error) or (
            reason == "undecodable" and header is not None and not has_room(header.width, header.height)
        ):
            reason, detail = "no_memory", f"no memory for {_size(header)}; workers.decoder_memory_mb sets how much"
        return Checked(FAILED, reason, detail, sha256=digest)


def _gunzipped(data: bytes | memoryview, limit: int) -> bytes:
    """The image that a server has compressed although nobody asked for it."""
    unpacked, rest = b"", bytes(data)
    while rest:  # one member after the other
        inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        unpacked += inflate.decompress(rest, limit + 1 - len(unpacked))
        if len(unpacked) > limit:
            raise ImageError("too_big", f"more than {limit} bytes once unpacked")
        if not inflate.eof:
            raise ImageError("undecodable", "gzip: cut short")
        rest = inflate.unused_data
    return unpacked


def _size(header: Header | None) -> str:
    return "its header" if header is None else f"{header.width} × {header.height} pixels of {header.format}"


def resized(image: Image, size: int, *, crop: bool, enlarge: bool) -> Pixels:
    """Shorter side to `size`, the centre square of that or all of it.

    The result is where it would be if the whole image were decoded, resized by area and then cut, though the pixels
    may have been scaled down while decoding: a JPEG's are, and their edges lie between pixels then. Off by half a
    pixel would cost 8 dB.
    """
    shorter = min(image.width, image.height)
    size = size if enlarge else min(size, shorter)
    whole = (max(size, round(image.width * size / shorter)), max(size, round(image.height * size / shorter)))
    left, top = ((whole[0] - size) // 2, (whole[1] - size) // 2) if crop else (0, 0)
    width, height = (size, size) if crop else whole
    across, down = image.width * image.scale / whole[0], image.height * image.scale / whole[1]
    if image.scale == 1.0 and not (min(across, down) > 1.0 and max(across, down) <= _ONE_SAMPLE):
        return np.ascontiguousarray(_whole(image.pixels, whole)[top : top + height, left : left + width])
    return _sampled(image.pixels, (left * across, top * down), (across, down), (width, height))


def _whole(pixels: Pixels, target: tuple[int, int]) -> Pixels:
    rows, columns = pixels.shape[:2]
    if (columns, rows) == target:
        return pixels
    how = cv2.INTER_CUBIC if columns < target[0] or rows < target[1] else cv2.INTER_AREA
    return np.asarray(cv2.resize(pixels, target, interpolation=how), np.uint8)


def _sampled(pixels: Pixels, corner: tuple[float, float], step: tuple[float, float], target: tuple[int, int]) -> Pixels:
    """Target pixels of `step` pixels each, from a corner that may lie between pixels; each the mean of its samples."""
    samples = 1 if max(step) <= _ONE_SAMPLE else math.ceil(max(step) / _ONE_SAMPLE)
    (left, top), (across, down) = corner, (step[0] / samples, step[1] / samples)
    matrix = np.array([[across, 0, left + across / 2 - 0.5], [0, down, top + down / 2 - 0.5]])
    sampled = cv2.warpAffine(
        pixels,
        matrix,
        (target[0] * samples, target[1] * samples),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return np.asarray(sampled if samples == 1 else cv2.resize(sampled, target, interpolation=cv2.INTER_AREA), np.uint8)


def encode(pixels: Pixels, format: Literal["jpeg", "webp"], quality: int) -> bytes:
    if format == "jpeg":
        return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))
    sink = io.BytesIO()
    Pillow.fromarray(pixels).save(sink, "WEBP", quality=quality, method=2)
    return sink.getvalue()


def _refused(header: Header, rules: ImageRules) -> tuple[str, str] | None:
    """Outcome and reason of an image that is not even to be decoded."""
    shorter, longer = sorted((header.width, header.height))
    if shorter < rules.least_side:
        return FAILED, "too_small"
    if rules.min_side is not None and shorter < rules.min_side:
        return FILTERED, "min_size"
    if longer > min(rules.max_aspect or ABSURD_ASPECT, ABSURD_ASPECT) * shorter:
        return FILTERED, "aspect"
    return None
