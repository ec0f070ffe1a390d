"""Small bodies that decode to very large images or files."""

import struct
import zlib

MiB = 1 << 20


def huge_png(width: int, height: int) -> bytes:
    """Return a PNG of one bit per pixel with 4 MiB of pixels, whatever size its header declares."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(4 * MiB), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def huge_jpeg(width: int, height: int) -> bytes:
    """A grey baseline JPEG with the scan of its first few thousand blocks; decoders fill in the rest."""

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data

    one_code = b"\x01" + bytes(15) + b"\x00"
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xDB, b"\x00" + b"\x01" * 64),
            segment(0xC0, struct.pack(">BHHBBBB", 8, height, width, 1, 1, 0x11, 0)),
            segment(0xC4, b"\x00" + one_code),
            segment(0xC4, b"\x10" + one_code),
            segment(0xDA, b"\x01\x01\x00\x00\x3f\x00"),
            bytes(4096),
            b"\xff\xd9",
        )
    )
