"""Damaged image files: a picture of every format that is decoded, and mutations that know the format's structure."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from PIL import Image

Span = tuple[int, int]
"""The first byte of an element of a file, and the first after it."""
_EXTREME = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_CHANGES_EACH = (1, 1, 1, 1, 2, 2, 3)


@dataclass(frozen=True)
class Seed:
    """A good file."""

    name: str
    data: bytes
    elements: list[Span] = field(default_factory=list)
    """Segments, chunks, blocks, entries or boxes, in order."""


def seeds() -> list[Seed]:
    """Return a file of each format and variant."""
    photo = _photo(97, 61)
    exif = Image.Exif()
    exif[0x0112] = 6
    variants: dict[str, tuple[str, Image.Image, dict[str, object]]] = {
        "jpeg": ("JPEG", photo, {"quality": 80}),
        "jpeg progressive": ("JPEG", photo, {"progressive": True, "exif": exif}),
        "jpeg cmyk": ("JPEG", photo.convert("CMYK"), {}),
        "jpeg grey": ("JPEG", photo.convert("L"), {"restart_marker_blocks": 3}),
        "png": ("PNG", photo, {}),
        "png palette": ("PNG", photo.quantize(16), {"transparency": 3}),
        "png 16 bits": ("PNG", Image.fromarray(np.arange(6000, dtype=np.uint16).reshape(60, 100)), {}),
        "png alpha": ("PNG", photo.convert("RGBA"), {"exif": exif}),
        "webp": ("WEBP", photo, {"exif": exif}),
        "webp lossless": ("WEBP", photo.convert("RGBA"), {"lossless": True}),
        "webp animated": ("WEBP", photo, {"save_all": True, "append_images": [_photo(97, 61, 1)]}),
        "gif": ("GIF", photo.quantize(32), {}),
        "gif animated": ("GIF", photo.quantize(32), {"save_all": True, "append_images": [_photo(97, 61, 1)]}),
        "bmp": ("BMP", photo, {}),
        "tiff": ("TIFF", photo, {}),
        "tiff lzw": ("TIFF", photo, {"compression": "tiff_lzw"}),
        "tiff deflate": ("TIFF", photo, {"compression": "tiff_adobe_deflate"}),
        "tiff jpeg": ("TIFF", photo, {"compression": "jpeg"}),
        "avif": ("AVIF", photo, {"quality": 50}),
    }
    result = []
    for name, (kind, picture, options) in variants.items():
        buffer = io.BytesIO()
        picture.save(buffer, kind, **options)
        data = buffer.getvalue()
        result.append(Seed(name, data, _ELEMENTS[kind](data)))
    return result


def mutate(seed: Seed, draw: random.Random, others: Sequence[Seed]) -> bytes:
    """Return a seed with a few changes, most of which leave its structure whole."""
    data, elements = bytearray(seed.data), seed.elements
    for _ in range(draw.choice(_CHANGES_EACH)):
        if not data:
            break
        change = draw.choice(_CHANGES)
        # Without its signature a file is refused at once.
        signature = int(draw.random() < 0.95)
        data = bytearray(change(data, [span for span in elements[signature:] if span[1] <= len(data)], draw, others))
        if change in _MOVES:
            elements = []  # they lie elsewhere now
    # A decoder that checks sums would stop at them, and never see what lies behind.
    if seed.name.startswith("png") and draw.random() < 0.8:
        _repair_png(data)
    return bytes(data)


# --- changes ----------------------------------------------------------------------------------------------------------


def _change_bytes(data: bytearray, elements: list[Span], draw: random.Random, _: Sequence[Seed]) -> bytes:
    """Overwrite a few bytes of one element, most often of its head."""
    first, last = draw.choice(elements) if elements else (0, len(data))
    reach = max(1, min(last - first, 16 if draw.random() < 0.7 else last - first))
    for _ in range(draw.randint(1, 2)):
        data[first + draw.randrange(reach)] = draw.randrange(256)
    return data


def _change_number(data: bytearray, elements: list[Span], draw: random.Random, _: Sequence[Seed]) -> bytes:
    """Put an extreme number in place of a length, a size or a count."""
    first, last = draw.choice(elements) if elements else (0, len(data))
    width, order = draw.choice("BHI"), draw.choice("<>")
    size = struct.calcsize(width)
    at = first + draw.randrange(max(1, min(last - first, 24)))
    if at + size <= len(data):
        struct.pack_into(order + width, data, at, draw.choice(_EXTREME) & ((1 << 8 * size) - 1))
    return data


def _truncate(data: bytearray, elements: list[Span], draw: random.Random, _: Sequence[Seed]) -> bytes:
    return data[: draw.choice([span[0] for span in elements] or [0]) or draw.randrange(len(data))]


def _remove(data: bytearray, elements: list[Span], draw: random.Random, _: Sequence[Seed]) -> bytes:
    first, last = draw.choice(elements) if elements else (0, 1)
    return data[:first] + data[last:]


def _repeat(data: bytearray, elements: list[Span], draw: random.Random, _: Sequence[Seed]) -> bytes:
    """Repeat an element, now and then many times."""
    first, last = draw.choice(elements) if elements else (0, len(data))
    times = draw.choice((1, 1, 2, 1000)) if last - first < 2000 else 1
    return data[:last] + data[first:last] * times + data[last:]


def _swap(data: bytearray, elements: list[Span], draw: random.Random, _: Sequence[Seed]) -> bytes:
    if len(elements) < 2:
        return data
    (a, b), (c, d) = sorted(draw.sample(elements, 2))
    return data if c < b else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _splice(data: bytearray, elements: list[Span], draw: random.Random, others: Sequence[Seed]) -> bytes:
    """Insert an element of another file."""
    other = draw.choice(others)
    first, last = draw.choice(other.elements) if other.elements else (0, len(other.data))
    at = draw.choice([span[1] for span in elements] or [len(data)])
    return data[:at] + other.data[first:last] + data[at:]


_MOVES = (_truncate, _remove, _repeat, _swap, _splice)
_CHANGES = (*[_change_bytes] * 5, *[_change_number] * 3, *_MOVES)


def _repair_png(data: bytearray) -> None:
    """Correct the checksums of a PNG's chunks."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            return
        struct.pack_into(">I", data, at + 8 + length, zlib.crc32(data[at + 4 : at + 8 + length]))
        at += 12 + length


# --- the elements of each format --------------------------------------------------------------------------------------


def _jpeg(data: bytes) -> list[Span]:
    """Return the segments, and the entropy-coded data after each that has some."""
    starts = [0]
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xD9:
        starts.append(at)
        scan = data[at + 1] == 0xDA
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
        if scan:
            starts.append(at)
            while at + 1 < len(data) and (data[at] != 0xFF or data[at + 1] == 0 or 0xD0 <= data[at + 1] <= 0xD7):
                at += 1
    return list(pairwise([*starts, at, len(data)]))


def _chunked(data: bytes, at: int, head: int, length_at: int, order: str, after: int, align: int = 1) -> list[Span]:
    """Return the elements of a file that is a row of lengths and contents."""
    spans = [(0, at)]
    while at + head <= len(data):
        (length,) = struct.unpack_from(order + "I", data, at + length_at)
        end = min(len(data), at + head + length + after + -length % align)
        spans.append((at, end))
        at = end
    return spans


def _png(data: bytes) -> list[Span]:
    return _chunked(data, 8, 8, 0, ">", 4)


def _webp(data: bytes) -> list[Span]:
    return _chunked(data, 12, 8, 4, "<", 0, 2)


def _gif(data: bytes) -> list[Span]:
    """Return the header with its palette, and the rest cut at the blocks' introducers."""
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    starts = [0, *(n for n in range(at, len(data) - 1) if data[n] in b"\x21\x2c" and data[n - 1] == 0)]
    return list(pairwise([*starts, len(data)]))


def _tiff(data: bytes) -> list[Span]:
    """Return the header, and the directory's entries."""
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    return [(0, 8), (at, at + 2), *((at + 2 + 12 * n, at + 14 + 12 * n) for n in range(count))]


def _boxes(data: bytes) -> list[Span]:
    """Return the boxes of an ISO media file, with those inside `meta` and what it holds."""

    def inside(first: int, last: int) -> list[Span]:
        spans = []
        while first + 8 <= last:
            (size,) = struct.unpack_from(">I", data, first)
            end = min(last, first + max(8, size))
            spans.append((first, end))
            kind = data[first + 4 : first + 8]
            if kind in (b"meta", b"iprp", b"ipco"):
                spans += inside(first + (12 if kind == b"meta" else 8), end)
            first = end
        return spans

    return inside(0, len(data))


def _whole(data: bytes) -> list[Span]:
    return [(0, 14), (14, 54), (54, len(data))]


_ELEMENTS: dict[str, Callable[[bytes], list[Span]]] = {
    "JPEG": _jpeg, "PNG": _png, "WEBP": _webp, "GIF": _gif, "BMP": _whole, "TIFF": _tiff, "AVIF": _boxes,
}  # fmt: skip


def _photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return noise over a gradient, which compresses like a photograph."""
    draw = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 200, width), np.linspace(0, 200, height))
    pixels = np.stack([across, down, 200 - across], axis=-1) + draw.normal(0, 12, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
