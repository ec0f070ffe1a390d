"""Small bodies that decode to very large images or files."""

import functools
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


def huge_gif(width: int, height: int) -> bytes:
    """A whole and valid GIF: an immense canvas with a frame of one pixel."""
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return screen + frame + b"\x3b"


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


@functools.lru_cache(maxsize=1)
def gzip_bomb(prefix: bytes, zeros: int) -> bytes:
    """One valid gzip stream of `prefix` and that many zeros; a block of zeros is compressed once, repeated often."""
    size = 16 * MiB
    blocks, rest = divmod(zeros, size)
    block = bytes(size)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = deflate.compress(prefix) + deflate.flush(zlib.Z_FULL_FLUSH)
    # After a full flush the next block refers to nothing before it, so it can be placed anywhere.
    middle = deflate.compress(block) + deflate.flush(zlib.Z_FULL_FLUSH) if blocks else b""
    end = deflate.compress(bytes(rest)) + deflate.flush(zlib.Z_FINISH)
    check = zlib.crc32(prefix)
    for _ in range(blocks):
        check = zlib.crc32(block, check)
    check = zlib.crc32(bytes(rest), check)
    trailer = struct.pack("<II", check, (len(prefix) + zeros) & 0xFFFFFFFF)
    return b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + start + middle * blocks + end + trailer
