"""Image errors, and what decoders do not tell of image files: the sizes of WebPs, and EXIF orientations."""

import re
import struct
import warnings

from sdp.datasets.outcomes import FAILURE_REASONS

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
            orientation = exif_orientation(bytes(data[at + 10 : at + 2 + length]))
        at += 2 + length
    return orientation


def exif_orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data; 1 if there is none or it is broken."""
    from PIL import Image

    tags = Image.Exif()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there would be one about each broken tag
            tags.load(exif)
            orientation = tags.get(0x0112, 1)
    except Exception:  # noqa: BLE001 (Pillow raises any exception on malformed bytes)
        return 1
    return orientation if orientation in range(1, 9) else 1
