"""Image errors, and the checks of image files that decoders omit: PNG chunks, WebP sizes, EXIF orientations."""

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress

from sdp.datasets.outcomes import FAILURE_REASONS

_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""The passes of an interlaced PNG: the first column and row of each, and the steps between its columns and rows."""
_PIECE_BYTES = 16 << 10
"""Compressed bytes that are inflated at once, to at most a thousand times as many."""
_INTEGERS = {1: "B", 3: "H", 4: "I"}
"""The whole numbers among EXIF's types, as struct names them."""
_MARKER, _AFTER_SCAN = re.compile(rb"\xff([^\0\xff])", re.DOTALL), re.compile(rb"\xff[^\0\xd0-\xd7\xff]", re.DOTALL)
"""A JPEG's marker, and one that ends the pixels of a scan."""
_SCAN, _END, _EXIF = 0xDA, 0xD9, 0xE1
_NO_MEMORY = re.compile(r"(insufficient|out of|not enough) memory|allocat|bad_alloc", re.IGNORECASE)
"""Messages of decoders that report a lack of memory without a MemoryError."""


class RowError(ValueError):
    """A row that cannot be used, with one of the account's reasons and a detail."""

    def __init__(self, reason: str, detail: str) -> None:
        if reason not in FAILURE_REASONS:
            raise ValueError(f"unknown reason: {reason}")
        self.reason, self.detail = reason, detail
        super().__init__(f"{FAILURE_REASONS[reason]}: {detail}")


class ImageError(RowError):
    """An image that cannot be used; the detail is the decoder's message."""


def check_png(data: bytes | memoryview) -> None:
    """Refuse an incomplete PNG: Pillow draws missing rows black, and ignores some wrong checksums.

    The pixels are inflated here too, only to count their bytes.
    """
    inflater, inflated, expected, kind = zlib.decompressobj(), 0, -1, b""
    try:
        for kind, body in _png_chunks(memoryview(data)):
            if kind == b"IHDR" and len(body) == 13:
                expected = _png_bytes(body)
            for at in range(0, len(body) if kind == b"IDAT" else 0, _PIECE_BYTES):
                if not inflater.eof and inflated <= expected:
                    inflated += len(inflater.decompress(body[at : at + _PIECE_BYTES]))
    except zlib.error as error:
        raise undecodable("PNG", error) from error
    ended = kind == b"IEND"
    if not ended or inflated < expected:
        raise ImageError("undecodable", f"PNG: {inflated} of {expected} bytes of pixels{'' if ended else ', no end'}")


def _png_chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the kind and content of each chunk, up to IEND; raise ImageError for a truncated or damaged one."""
    at, kind = 8, b""
    while at + 12 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            raise ImageError("undecodable", "PNG: truncated")
        (checksum,) = struct.unpack_from(">I", data, end)
        critical = not kind[0] & 0x20
        if critical and zlib.crc32(data[at + 4 : end]) != checksum:
            raise ImageError("undecodable", f"PNG: wrong checksum of {kind.decode('latin-1')}")
        yield kind, data[at + 8 : end]
        at = end + 4


def _png_bytes(header: memoryview) -> int:
    """Return the size of the pixels that a PNG's IHDR announces, in bytes, with a filter byte for each row."""
    width, height, depth, colours, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colours, 1)
    if not interlaced:
        return int(height * (1 + -(-width * bits // 8)))
    total = 0
    for left, top, column_step, row_step in _ADAM7:
        columns, rows = -(-max(0, width - left) // column_step), -(-max(0, height - top) // row_step)
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total


def lacks_memory(error: BaseException) -> bool:
    """Return whether a decoder or encoder has run out of memory, whatever exception it raised."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def undecodable(subject: str, error: Exception) -> Exception:
    """Return the exception to raise for a decoder's error."""
    if lacks_memory(error):
        return error if isinstance(error, MemoryError) else MemoryError(str(error))
    return ImageError("undecodable", f"{subject}: {error}")


def webp_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return the width and height that a WebP's first chunk announces; None for anything else."""
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


def jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation of a JPEG, by its first EXIF segment alone, as in Chromium; 1 if there is none."""
    for marker, start, end in _jpeg_segments(data):
        if marker == _EXIF and bytes(data[start + 4 : start + 10]) == b"Exif\0\0":
            return exif_orientation(bytes(data[start + 10 : end]))
        if marker == _SCAN:
            break
    return 1


def without_stray_bytes(data: bytes | memoryview) -> bytes:
    """Return a JPEG without bytes between its segments, which browsers pass over; a scan's pixels stay as they are."""
    return b"".join([data[:2], *(data[start:end] for _, start, end in _jpeg_segments(data))])


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment of a JPEG, and (0, start, end) of the pixels after a scan's header."""
    at = 2
    while (match := _MARKER.search(data, at)) is not None:
        marker, at = match[1][0], match.end()
        if not 0xD0 <= marker <= _END and marker != 1:  # those have no length
            at += max(2, int.from_bytes(data[at : at + 2]))
        yield marker, match.start(), at
        if marker == _END:
            return
        if marker == _SCAN:
            end = _AFTER_SCAN.search(data, at)
            yield 0, at, end.start() if end else len(data)
            at = end.start() if end else len(data)


def png_exif(data: bytes | memoryview) -> bytes:
    """Return a PNG's EXIF data as in Chromium: the first, and nothing that comes after pixels."""
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"eXIf", b"IDAT"):
            return bytes(data[at + 8 : at + 8 + length]) if kind == b"eXIf" else b""
        at += 12 + length
    return b""


def exif_orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data; 1 if there is none or it is broken.

    Pillow would read all tags, and print a line for each that is broken.
    """
    data = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    if order is None:
        return 1
    with suppress(struct.error):
        (at,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, at)
        for place in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, values = struct.unpack_from(f"{order}HHI", data, place)
            if (tag, values) == (0x0112, 1) and kind in _INTEGERS:
                (orientation,) = struct.unpack_from(f"{order}{_INTEGERS[kind]}", data, place + 8)
                return int(orientation) if 1 <= orientation <= 8 else 1
    return 1
