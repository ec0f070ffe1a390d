"""Image errors, and the checks of image files that decoders omit: PNG chunks, WebP sizes, EXIF orientations."""

import re
import struct
import zlib

from sdp.datasets.outcomes import FAILURE_REASONS

_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""An interlaced PNG's passes: first column and row, and their steps."""
_INFLATED_AT_ONCE = 64 << 10
_NO_MEMORY = re.compile(r"(insufficient|out of|not enough) memory|allocat|bad_alloc", re.IGNORECASE)
"""Messages of decoders that raise no MemoryError."""


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

    For this the pixels are inflated a second time, in small pieces and no further than their end.
    """
    data, at, inflated = memoryview(data), 8, 0
    inflate, expected, ended = zlib.decompressobj(), -1, False
    while at + 12 <= len(data) and not ended:
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        critical = not kind[0] & 0x20
        if len(body) < length or at + 12 + length > len(data):
            raise ImageError("undecodable", "PNG: truncated")
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
                raise undecodable("PNG", error) from error
        ended = kind == b"IEND"
        at += 12 + length
    if inflated <= expected:
        inflated += len(inflate.flush())  # a few bytes may be left over from the last piece
    if not ended or inflated < expected:
        raise ImageError("undecodable", f"PNG: {inflated} of {expected} bytes of pixels{'' if ended else ', no end'}")


def _png_bytes(header: memoryview) -> int:
    """Return the bytes of pixels that a PNG's IHDR announces, with the filter byte of each row."""
    width, height, depth, colours, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colours, 1)
    if not interlaced:
        return int(height * (1 + -(-width * bits // 8)))
    total = 0
    for left, top, across, down in _ADAM7:
        columns, rows = -(-max(0, width - left) // across), -(-max(0, height - top) // down)
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total


def lacks_memory(error: BaseException) -> bool:
    """Return whether a decoder or encoder has run out of memory, whatever exception it raised."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def undecodable(what: str, error: Exception) -> Exception:
    """Return the exception to raise for a decoder's error."""
    if lacks_memory(error):
        return error if isinstance(error, MemoryError) else MemoryError(str(error))
    return ImageError("undecodable", f"{what}: {error}")


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
    """Return the EXIF orientation of a JPEG; 1 if there is none or it is broken."""
    at, orientation = 2, 1
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in (0xDA, 0xD9):  # start of the pixels, or end of the image
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            orientation = tiff_orientation(bytes(data[at + 10 : at + 2 + length]))
        at += 2 + length
    return orientation


def tiff_orientation(exif: bytes) -> int:
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
