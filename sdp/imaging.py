"""Image bytes of any kind to upright RGB pixels, and from those to crops of a size.

Pure functions on bytes and arrays; what is wrong with an image is an ImageError with a reason of the account's closed
set. JPEGs, nearly all of the web, take a fast way: they are decoded no larger than needed (scaled while decoding).
A truncated or damaged image is refused, never half grey.

>>> image = decode(data, min_side=256)
>>> crop = cut(image, centre_box(image.width, image.height), 256, 256)  # (256, 256, 3) uint8
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.outcomes import FAILURE_REASONS

Pixels = NDArray[np.uint8]
"""Rows × columns × RGB."""

MAX_PIXELS = 100_000_000
MAX_SCANS = 300
"""A progressive JPEG has about ten, any other at most four; one of thousands keeps a decoder busy for minutes."""
FORMATS = ("PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""What Pillow may open besides JPEG; others (EPS, PDF, …) run interpreters or are no photographs."""
WEB_FORMATS = tuple(name for name in FORMATS if name != "TIFF")
"""Without the decoder that has had more holes than all others together."""

_LINEAR_UNTIL = 2.0
"""Up to this reduction bilinear sampling is as near to Lanczos as an antialiased filter that costs several times more:
44 dB on photographs; at exactly 2 it is the mean of four pixels."""
_EIGHTHS = (1, 2, 4, 8)
"""Scales to decode JPEGs at. The odd ones have no vector code: 5/8 takes longer than the whole."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""An interlaced PNG's passes: first column and row, and their steps."""
_INFLATED_AT_ONCE = 64 << 10
_BYTES_A_PIXEL = 12
"""What decoding takes at most: RGBA, a canvas to lay it on, and RGB with something beside it."""
_NO_MEMORY = re.compile(r"(insufficient|out of|not enough) memory|allocat|bad_alloc", re.IGNORECASE)
"""How decoders say it that raise no MemoryError."""
_TRANSPOSED = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""


class RowError(ValueError):
    """A row that cannot be used: a reason of the account's closed set, and a detail."""

    def __init__(self, reason: str, detail: str) -> None:
        if reason not in FAILURE_REASONS:
            raise ValueError(f"no such reason: {reason}")
        self.reason, self.detail = reason, detail
        super().__init__(f"{FAILURE_REASONS[reason]}: {detail}")


class ImageError(RowError):
    """An image that cannot be used; the detail is what the decoder said."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an image says of itself before it is decoded. Width and height are those of the upright image."""

    format: str
    width: int
    height: int
    orientation: int = 1
    """EXIF: 1 is upright."""


@dataclass(frozen=True, slots=True)
class Image:
    """A decoded image; its pixels may be fewer than its width × height where fewer were enough."""

    pixels: Pixels
    format: str
    width: int
    height: int
    scale: float = 1.0
    """Pixels here per pixel of the whole image."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of an upright image, in its full-size pixels; edges may lie between them."""

    left: float
    top: float
    width: float
    height: float


def read_header(data: bytes | memoryview, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS) -> Header:
    """Format and size, without decoding."""
    data = memoryview(data).cast("B")  # Arrow's buffers are of signed bytes, which decoders refuse
    if not len(data):
        raise ImageError("empty", "no bytes")
    if bytes(data[:3]) == b"\xff\xd8\xff":
        return _checked(_jpeg_header(data)[0], max_pixels)
    with _opened(data, max_pixels, formats) as picture:
        return _checked(_header_of(picture), max_pixels)


def decode(data: bytes | memoryview, *, min_side: int | None = None, max_pixels: int = MAX_PIXELS) -> Image:
    """Upright RGB pixels, alpha over white, the first frame of an animation.

    With `min_side` a large JPEG may come smaller, its shorter side no less than that: several times faster.
    """
    data = memoryview(data).cast("B")
    if not len(data):
        raise ImageError("empty", "no bytes")
    if bytes(data[:3]) == b"\xff\xd8\xff":
        header, colours = _jpeg_header(data)
        _checked(header, max_pixels)
        if colours not in ("CMYK", "YCCK"):
            return _decode_jpeg(data, header, min_side)
    return _decode_other(data, max_pixels)


def centre_box(width: int, height: int, aspect: float = 1.0) -> Box:
    """The largest box of an aspect ratio (width to height) in the middle of an image."""
    return random_box(width, height, 0.5, 0.5, aspect)


def random_box(width: int, height: int, across: float, down: float, aspect: float = 1.0) -> Box:
    """The largest box of an aspect ratio; `across` and `down` in [0, 1] say where in the room that it leaves."""
    wide, tall = min(width, height * aspect), min(height, width / aspect)
    return Box((width - wide) * across, (height - tall) * down, wide, tall)


def cut(image: Image, box: Box, width: int, height: int) -> Pixels:
    """A box of an image at a size; antialiased where it gets smaller, bicubic where it gets larger."""
    rows, columns = image.pixels.shape[:2]
    left, top = box.left * image.scale, box.top * image.scale
    # A scaled JPEG rounds its size up: the last pixel may reach beyond the image's edge.
    right = min(left + box.width * image.scale, columns)
    bottom = min(top + box.height * image.scale, rows)
    reduction = max((right - left) / width, (bottom - top) / height)
    whole = all(edge == int(edge) for edge in (left, top, right, bottom))
    if whole and (right - left, bottom - top) == (width, height):
        return np.ascontiguousarray(image.pixels[int(top) : int(bottom), int(left) : int(right)])
    if 1 <= reduction <= _LINEAR_UNTIL and (right - left) >= width and (bottom - top) >= height:
        return _sample(image.pixels, (left, top, right, bottom), width, height)
    return _filter(image.pixels, (left, top, right, bottom), width, height)


def shrink(pixels: Pixels, width: int, height: int) -> Pixels:
    """All of some pixels at another size."""
    rows, columns = pixels.shape[:2]
    return cut(Image(pixels, "", columns, rows), Box(0, 0, columns, rows), width, height)


def _sample(pixels: Pixels, edges: tuple[float, float, float, float], width: int, height: int) -> Pixels:
    """Bilinear sampling, with edges between pixels."""
    import cv2

    left, top, right, bottom = edges
    x, y = (right - left) / width, (bottom - top) / height
    matrix = np.array([[x, 0, left + x / 2 - 0.5], [0, y, top + y / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    sampled = cv2.warpAffine(pixels, matrix, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(sampled, dtype=np.uint8)


def _filter(pixels: Pixels, edges: tuple[float, float, float, float], width: int, height: int) -> Pixels:
    """Bicubic with its support widened to the reduction, so that nothing aliases."""
    from PIL import Image as Pillow

    left, top, right, bottom = edges
    margin = 4 * max(1, int((right - left) / width) + 1)  # what the filter reaches beyond the box, and a little more
    x, y = max(0, int(left) - margin), max(0, int(top) - margin)
    near = np.ascontiguousarray(pixels[y : int(bottom) + margin, x : int(right) + margin])
    box = (left - x, top - y, right - x, bottom - y)
    resized = Pillow.fromarray(near).resize((width, height), Pillow.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return np.asarray(resized, dtype=np.uint8)


def _jpeg_header(data: bytes | memoryview) -> tuple[Header, str]:
    """The header, and the colours that the JPEG is stored in."""
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise _undecodable("JPEG", error) from error
    orientation = _jpeg_orientation(data)
    octets = np.frombuffer(data, np.uint8)
    scans = int(np.count_nonzero(octets[np.flatnonzero(octets[:-1] == 0xFF) + 1] == 0xDA))
    if scans > MAX_SCANS:
        raise ImageError("undecodable", f"JPEG of {scans} scans")
    return Header("JPEG", *_upright(width, height, orientation), orientation), colours


def _decode_jpeg(data: bytes | memoryview, header: Header, min_side: int | None) -> Image:
    import simplejpeg

    width, height = _upright(header.width, header.height, header.orientation)  # as stored
    shorter, eighths = min(width, height), 8
    if min_side is not None:
        eighths = next((n for n in _EIGHTHS if -(-shorter * n // 8) >= min_side), 8)
    least = (0, 0) if eighths == 8 else (-(-height * eighths // 8), -(-width * eighths // 8))
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1])
    except ValueError as error:
        raise _undecodable("JPEG", error) from error
    # What came is what was asked for, or of a tiny image something as small.
    came = pixels.shape[:2]
    eighths = next(n for n in range(8, 0, -1) if (-(-height * n // 8), -(-width * n // 8)) == came)
    return Image(_turned(pixels, header.orientation), "JPEG", header.width, header.height, eighths / 8)


def _decode_other(data: bytes | memoryview, max_pixels: int) -> Image:
    with _opened(data, max_pixels) as picture:
        header = _checked(_header_of(picture), max_pixels)
        if header.format == "PNG":
            _check_png(data)
        try:
            picture.load()
            pixels = _rgb(picture)
        except ImageError:
            raise
        except Exception as error:  # Pillow's plugins raise whatever the bytes make them stumble over
            raise _undecodable(f"{header.format}: {type(error).__name__}", error) from error
    return Image(_turned(pixels, header.orientation), header.format, header.width, header.height)


def _check_png(data: bytes | memoryview) -> None:
    """Refuse a PNG that is not whole: Pillow draws black where rows are missing, and passes over some wrong checksums.

    It is inflated once more for that, in small pieces, and no further than to the end of the pixels.
    """
    data, at, inflated = memoryview(data), 8, 0
    inflate, expected, ended = zlib.decompressobj(), -1, False
    while at + 12 <= len(data) and not ended:
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        critical = not kind[0] & 0x20
        if len(body) < length or at + 12 + length > len(data):
            raise ImageError("undecodable", "PNG: cut short")
        if (
            critical
            and zlib.crc32(data[at + 4 : at + 8 + length]) != struct.unpack_from(">I", data, at + 8 + length)[0]
        ):
            raise ImageError("undecodable", f"PNG: wrong checksum of {kind.decode('latin-1')}")
        if kind == b"IHDR" and length == 13:
            expected = _png_bytes(body)
        elif kind == b"IDAT":
            try:
                for start in range(0, length, _INFLATED_AT_ONCE):
                    rest = bytes(body[start : start + _INFLATED_AT_ONCE])
                    while rest and not inflate.eof and inflated <= expected:
                        inflated += len(inflate.decompress(rest, 1 << 20))
                        rest = inflate.unconsumed_tail
            except zlib.error as error:
                raise _undecodable("PNG", error) from error
        ended = kind == b"IEND"
        at += 12 + length
    if inflated <= expected:
        inflated += len(inflate.flush())  # a few bytes that found no room in the last piece
    if not ended or inflated < expected:
        raise ImageError("undecodable", f"PNG: {inflated} of {expected} bytes of pixels{'' if ended else ', no end'}")


def _png_bytes(header: memoryview) -> int:
    """The bytes of pixels that a PNG's IHDR announces, with the filter byte of each row."""
    width, height, depth, colours, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colours, 1)
    if not interlaced:
        return int(height * (1 + -(-width * bits // 8)))
    total = 0
    for left, top, across, down in _ADAM7:
        columns, rows = -(-max(0, width - left) // across), -(-max(0, height - top) // down)
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total


def _opened(data: bytes | memoryview, max_pixels: int, formats: Sequence[str] = FORMATS) -> Any:
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    webp = _webp_size(data)
    if webp is not None:  # for which Pillow takes the memory of all pixels to open it, or calls it broken without
        _checked(Header("WEBP", *webp), max_pixels)
        if not has_room(*webp):
            raise MemoryError(f"{webp[0]} × {webp[1]} pixels")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked against max_pixels, not Pillow's guess
            return Pillow.open(io.BytesIO(data), formats=(*formats, "JPEG"))
    except UnidentifiedImageError as error:
        raise ImageError("not_an_image", f"begins with {bytes(data[:8])!r}") from error
    except Pillow.DecompressionBombError as error:
        raise ImageError("too_many_pixels", str(error)) from error
    except Exception as error:
        raise _undecodable(type(error).__name__, error) from error


def has_room(width: int, height: int) -> bool:
    """Whether there is memory to decode so many pixels at all. Not every decoder says so when that is what it lacks."""
    try:
        np.empty(width * height * _BYTES_A_PIXEL, np.uint8)
    except MemoryError:
        return False
    return True


def lacks_memory(error: BaseException) -> bool:
    """Whether it was memory that a decoder or encoder had too little of, whatever it calls it."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def _undecodable(what: str, error: Exception) -> Exception:
    """What is to be raised for a decoder's error."""
    if lacks_memory(error):
        return error if isinstance(error, MemoryError) else MemoryError(str(error))
    return ImageError("undecodable", f"{what}: {error}")


def _header_of(picture: Any) -> Header:
    try:
        if picture.format == "PNG":  # of which getexif() would decode all, and forget that it was broken
            orientation = _tiff_orientation(picture.info.get("exif", b"").removeprefix(b"Exif\0\0"))
        else:
            orientation = int(picture.getexif().get(0x0112, 1))
    except Exception:  # noqa: BLE001 (broken metadata does not make a broken image: Pillow raises many kinds on it)
        orientation = 1
    orientation = orientation if 1 <= orientation <= 8 else 1
    if picture.format == "TIFF":  # Pillow turns these itself
        orientation = 1
    return Header(picture.format, *_upright(picture.width, picture.height, orientation), orientation)


def _rgb(picture: Any) -> Pixels:
    """RGB pixels of a loaded picture of any mode."""
    from PIL import Image as Pillow

    if picture.mode in ("I", "LAB", "HSV"):
        raise ImageError("not_an_image", f"pixels are of mode {picture.mode}, which no picture of the web has")
    if picture.mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        wide = np.asarray(picture).astype(np.int64)
        narrow = np.clip((wide + 128) // 257, 0, 255).astype(np.uint8)
        return np.repeat(narrow[..., None], 3, axis=2)
    if picture.mode == "F":
        raise ImageError("not_an_image", "pixels are floating-point numbers of unknown range")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        over = picture.convert("RGBA")
        white = Pillow.new("RGBA", over.size, (255, 255, 255, 255))
        picture = Pillow.alpha_composite(white, over)
    return np.array(picture.convert("RGB"), dtype=np.uint8)


def _checked(header: Header, max_pixels: int) -> Header:
    if header.width < 1 or header.height < 1:
        raise ImageError("undecodable", f"{header.format} of {header.width} × {header.height} pixels")
    if header.width * header.height > max_pixels:
        raise ImageError("too_many_pixels", f"{header.width} × {header.height} pixels, {max_pixels} are allowed")
    return header


def _webp_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """The width and height that a WebP's first chunk announces; None for anything else."""
    head = bytes(data[:30])
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        return None
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if head[12:16] == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _upright(width: int, height: int, orientation: int) -> tuple[int, int]:
    return (height, width) if orientation in _TRANSPOSED else (width, height)


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels as a viewer would show them."""
    if orientation == 1:
        return pixels
    if orientation in _TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _jpeg_orientation(data: bytes | memoryview) -> int:
    """The EXIF orientation of a JPEG; 1 where there is none or it is broken."""
    at, orientation = 2, 1
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in (0xDA, 0xD9):  # pixels begin, or the image ends
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            orientation = _tiff_orientation(bytes(data[at + 10 : at + 2 + length]))
        at += 2 + length
    return orientation


def _tiff_orientation(exif: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or len(exif) < 10:
        return 1
    (at,) = struct.unpack_from(order + "I", exif, 4)
    if at + 2 > len(exif):
        return 1
    (entries,) = struct.unpack_from(order + "H", exif, at)
    for entry in range(at + 2, min(at + 2 + 12 * entries, len(exif) - 11), 12):
        tag, kind = struct.unpack_from(order + "HH", exif, entry)
        if tag == 0x0112 and kind == 3:
            (value,) = struct.unpack_from(order + "H", exif, entry + 8)
            return int(value) if 1 <= value <= 8 else 1
    return 1
