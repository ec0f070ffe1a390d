"""Decode images of any format to upright RGB pixels, and cut crops of a given size out of them.

These are pure functions on bytes and arrays. A bad image raises ImageError with one of the account's reasons. JPEGs,
nearly all images on the web, are scaled down while decoding, to no more pixels than needed. A truncated or damaged
image is refused, never returned with grey areas.

>>> image = decode(data, min_side=256)
>>> crop = cut(image, centre_box(image.width, image.height), 256, 256)  # (256, 256, 3) uint8
"""

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.imaging.containers import (
    ImageError,
    RowError,
    check_png,
    exif_orientation,
    jpeg_orientation,
    lacks_memory,
    png_exif,
    undecodable,
    webp_size,
    without_stray_bytes,
)

__all__ = ["ImageError", "RowError", "lacks_memory"]
"""Names of `containers` that other modules import from here."""

Pixels = NDArray[np.uint8]
"""An array of rows × columns × RGB."""
MAX_PIXELS = 100_000_000
MAX_SCANS = 300
"""The most scans of a JPEG. A progressive one has about ten, any other up to four; thousands take minutes to decode."""
FORMATS = ("PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats that Pillow may open besides JPEG; others (EPS, PDF, …) run interpreters or are not photographs."""
WEB_FORMATS = tuple(name for name in FORMATS if name != "TIFF")
"""The formats without TIFF, whose decoder has had more vulnerabilities than all others together."""
_JPEG = b"\xff\xd8\xff"
"""The first bytes of every JPEG."""
_STRAY = "extraneous bytes before marker"
"""A part of libjpeg's message about bytes that it has passed over."""
_LINEAR_UNTIL = 2.3
"""The largest reduction for which bilinear sampling is close enough to Lanczos, at a tenth of an antialiased filter's
cost: 44 dB on photographs. At exactly 2 it is the mean of four pixels."""
_EIGHTHS = (1, 2, 4, 8)
"""Scales for decoding JPEGs, in eighths. Other scales have no vector code: 5/8 takes longer than full size."""
_BYTES_A_PIXEL = 12
"""Peak memory of decoding: RGBA, a canvas of the same size, and RGB with a spare byte."""
_PNG_BITS = 24
"""The place of a PNG's bits a sample."""
_TRANSPOSED = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""


@dataclass(frozen=True, slots=True)
class Header:
    """An image's header, read without decoding. Width and height are those of the upright image."""

    format: str
    width: int
    height: int
    orientation: int = 1
    """EXIF orientation; 1 is upright."""
    colours: str = field(default="", compare=False)
    """A JPEG's colour space."""


OnHeader = Callable[[Header], None]
"""Called with an image's header before the image is decoded."""


@dataclass(frozen=True, slots=True)
class Image:
    """A decoded image. If fewer pixels are enough, it has fewer than its width × height."""

    pixels: Pixels
    format: str
    width: int
    height: int
    scale: float = 1.0
    """Decoded pixels per pixel of the whole image."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of an upright image, in its full-size pixels; edges may lie between pixels."""

    left: float
    top: float
    width: float
    height: float


def read_header(data: bytes | memoryview, formats: Sequence[str] = FORMATS) -> Header:
    """Read an image's format and size, without decoding it."""
    data = memoryview(data).cast("B")  # Arrow's buffers have signed bytes, which decoders refuse
    if bytes(data[:3]) == _JPEG:
        return _checked(_jpeg_header(data))
    with _open(data, formats) as picture:
        return _checked(_header_of(picture, data))


def decode(data: bytes | memoryview, *, min_side: int | None = None, header: Header | None = None) -> Image:
    """Decode to upright RGB pixels: alpha over white, the first frame of an animation.

    With `min_side`, a large JPEG is decoded at a reduced size, several times faster; its shorter side keeps at least
    that many pixels. Give the `header` if it has been read.
    """
    data = memoryview(data).cast("B")
    if bytes(data[:3]) == _JPEG:
        header = header or read_header(data)
        if header.colours not in ("CMYK", "YCCK"):
            return _decode_jpeg(data, header, min_side)
    return _decode_other(data)


def centre_box(width: int, height: int, aspect: float = 1.0) -> Box:
    """Return the largest box of an aspect ratio (width to height) in the middle of an image."""
    return placed_box(width, height, 0.5, 0.5, aspect)


def placed_box(width: int, height: int, across: float, down: float, aspect: float = 1.0) -> Box:
    """Return the largest box of an aspect ratio; `across` and `down` in [0, 1] place it in the space that it leaves."""
    wide, tall = min(width, height * aspect), min(height, width / aspect)
    return Box((width - wide) * across, (height - tall) * down, wide, tall)


def cut(image: Image, box: Box, width: int, height: int) -> Pixels:
    """Cut a box out of an image and resize it: antialiased if it gets smaller, bicubic if it gets larger.

    Edges that lie between decoded pixels may move to the nearest one.
    """
    import cv2

    rows, columns = image.pixels.shape[:2]
    left, top = box.left * image.scale, box.top * image.scale
    # A scaled JPEG's size is rounded up, so its last pixel may reach beyond the image's edge.
    right = min(left + box.width * image.scale, columns)
    bottom = min(top + box.height * image.scale, rows)
    across, down = (right - left) / width, (bottom - top) / height
    if min(across, down) < 1 or max(across, down) > _LINEAR_UNTIL:
        return _filter(image.pixels, (left, top, right, bottom), width, height)
    x, y = round(left), round(top)
    region = image.pixels[y : y + round(bottom - top), x : x + round(right - left)]
    return np.asarray(cv2.resize(region, (width, height), interpolation=cv2.INTER_LINEAR), np.uint8)


def shrink(pixels: Pixels, width: int, height: int) -> Pixels:
    """Resize all pixels of an image."""
    rows, columns = pixels.shape[:2]
    return cut(Image(pixels, "", columns, rows), Box(0, 0, columns, rows), width, height)


def fit(pixels: Pixels, side: int) -> Pixels:
    """Resize an image until no side is longer than this."""
    tall, wide = pixels.shape[:2]
    scale = side / max(tall, wide)
    return pixels if scale >= 1 else shrink(pixels, max(1, round(wide * scale)), max(1, round(tall * scale)))


def _filter(pixels: Pixels, edges: tuple[float, float, float, float], width: int, height: int) -> Pixels:
    """Resize by a bicubic filter whose support grows with the reduction, so that nothing aliases."""
    from PIL import Image as Pillow

    left, top, right, bottom = edges
    margin = 4 * max(1, int((right - left) / width) + 1)  # a little more than the filter's reach beyond the box
    x, y = max(0, int(left) - margin), max(0, int(top) - margin)
    region = np.ascontiguousarray(pixels[y : int(bottom) + margin, x : int(right) + margin])
    box = (left - x, top - y, right - x, bottom - y)
    resized = Pillow.fromarray(region).resize((width, height), Pillow.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return np.asarray(resized, dtype=np.uint8)


def _of_jpeg(decode: Callable[..., Any], data: bytes | memoryview, *arguments: Any, **options: Any) -> Any:
    """Call a function of simplejpeg; if stray bytes between segments make it fail, try again without them."""
    try:
        try:
            return decode(data, *arguments, **options)
        except ValueError as error:
            if _STRAY not in str(error):
                raise
            return decode(without_stray_bytes(data), *arguments, **options)
    except ValueError as error:
        raise undecodable("JPEG", error) from error


def _jpeg_header(data: bytes | memoryview) -> Header:
    import simplejpeg

    height, width, colours, _ = _of_jpeg(simplejpeg.decode_jpeg_header, data)
    orientation = jpeg_orientation(data)
    octets = np.frombuffer(data, np.uint8)
    scans = int(np.count_nonzero(octets[np.flatnonzero(octets[:-1] == 0xFF) + 1] == 0xDA))
    if scans > MAX_SCANS:
        raise ImageError("undecodable", f"JPEG of {scans} scans")
    return Header("JPEG", *_upright(width, height, orientation), orientation, colours)


def _decode_jpeg(data: bytes | memoryview, header: Header, min_side: int | None) -> Image:
    import simplejpeg

    width, height = _upright(header.width, header.height, header.orientation)  # as stored
    shorter, eighths = min(width, height), 8
    if min_side is not None:
        eighths = next((n for n in _EIGHTHS if -(-shorter * n // 8) >= min_side), 8)
    minimum = (0, 0) if eighths == 8 else (-(-height * eighths // 8), -(-width * eighths // 8))
    pixels = _of_jpeg(simplejpeg.decode_jpeg, data, "RGB", min_height=minimum[0], min_width=minimum[1])
    # A tiny image may come at another scale than the requested one.
    decoded = pixels.shape[:2]
    eighths = next(n for n in range(8, 0, -1) if (-(-height * n // 8), -(-width * n // 8)) == decoded)
    return Image(_rotated(pixels, header.orientation), "JPEG", header.width, header.height, eighths / 8)


def _decode_other(data: bytes | memoryview) -> Image:
    with _open(data) as picture:
        header = _checked(_header_of(picture, data))
        if header.format == "PNG":
            check_png(data)
        try:
            picture.load()
            pixels = _rgb(picture, _clear_value(picture, data))
        except ImageError:
            raise
        except Exception as error:  # Pillow's plugins raise any exception on malformed bytes
            raise undecodable(f"{header.format}: {type(error).__name__}", error) from error
    return Image(_rotated(pixels, header.orientation), header.format, header.width, header.height)


def _open(data: bytes | memoryview, formats: Sequence[str] = FORMATS) -> Any:
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    if not len(data):
        raise ImageError("empty", "no bytes")
    webp = webp_size(data)
    if webp is not None:  # to open one, Pillow needs memory for all its pixels, and without it reports a broken file
        _checked(Header("WEBP", *webp))
        if not has_room(*webp):
            raise MemoryError(f"{webp[0]} × {webp[1]} pixels")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked against MAX_PIXELS, not by Pillow's limit
            return Pillow.open(io.BytesIO(data), formats=(*formats, "JPEG"))
    except UnidentifiedImageError as error:
        raise ImageError("not_an_image", f"begins with {bytes(data[:8])!r}") from error
    except Pillow.DecompressionBombError as error:
        raise ImageError("too_many_pixels", str(error)) from error
    except Exception as error:
        raise undecodable(type(error).__name__, error) from error


def has_room(width: int, height: int) -> bool:
    """Return whether there is memory to decode an image of this size, since not every decoder reports a lack of it."""
    try:
        np.empty(width * height * _BYTES_A_PIXEL, np.uint8)
    except MemoryError:
        return False
    return True


def _header_of(picture: Any, data: bytes | memoryview) -> Header:
    # picture.getexif() would decode all of a PNG, and hide damage. Pillow itself rotates a TIFF.
    exif = png_exif(data) if picture.format == "PNG" else picture.info.get("exif", b"")
    orientation = 1 if picture.format == "TIFF" else exif_orientation(exif)
    return Header(picture.format, *_upright(picture.width, picture.height, orientation), orientation)


def _clear_value(picture: Any, data: bytes | memoryview) -> Any:
    """Return the value of transparent pixels in the range of the loaded ones; None if there is none.

    Pillow leaves a PNG's in the range of its samples, but loads those of 2 and 4 bits, and of 16 in colour, as bytes.
    """
    value = picture.info.get("transparency")
    bits = data[_PNG_BITS] if picture.format == "PNG" else 8
    if picture.mode == "L" and bits < 8 and value is not None:
        return value * 255 // ((1 << bits) - 1)
    return tuple(each >> 8 for each in value) if picture.mode == "RGB" and bits == 16 and value else value


def _rgb(picture: Any, clear: Any) -> Pixels:
    """Return the RGB pixels of a loaded picture of any mode; `clear` is the value of transparent ones, if any."""
    from PIL import Image as Pillow

    if picture.mode in ("I", "F", "LAB", "HSV"):
        raise ImageError("not_an_image", f"pixels of mode {picture.mode}, which web images do not use")
    if picture.mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        deep = np.asarray(picture).astype(np.int64)
        pixels = np.clip((deep + 128) // 257, 0, 255).astype(np.uint8)
        if clear is not None:
            pixels[deep == clear] = 255
        return np.repeat(pixels[..., None], 3, axis=2)
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or clear is not None:
        if clear is not None:
            picture.info["transparency"] = clear
        rgba = picture.convert("RGBA")
        white = Pillow.new("RGBA", rgba.size, (255, 255, 255, 255))
        picture = Pillow.alpha_composite(white, rgba)
    return np.array(picture.convert("RGB"), dtype=np.uint8)


def _checked(header: Header) -> Header:
    if header.width < 1 or header.height < 1:
        raise ImageError("undecodable", f"{header.format} of {header.width} × {header.height} pixels")
    if header.width * header.height > MAX_PIXELS:
        raise ImageError("too_many_pixels", f"{header.width} × {header.height} pixels, more than {MAX_PIXELS}")
    return header


def _upright(width: int, height: int, orientation: int) -> tuple[int, int]:
    return (height, width) if orientation in _TRANSPOSED else (width, height)


def _rotated(pixels: Pixels, orientation: int) -> Pixels:
    """Return pixels that are rotated and flipped to be upright."""
    if orientation == 1:
        return pixels
    if orientation in _TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
