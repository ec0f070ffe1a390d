"""Image bytes, and the pipe to a decoder."""

import io
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from sdp.imaging import decode, read_header
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox
from sdp.sources.tars import count_samples, read_samples
from tests.growth import Case


def _picture(format: str, side: int = 64, **options: object) -> bytes:
    sink = io.BytesIO()
    Image.effect_noise((side, side), 50).convert("RGB").save(sink, format, **options)
    return sink.getvalue()


def _decoded(data: bytes) -> Callable[[], object]:
    return lambda: (read_header(data), decode(data))


def _png(pieces: int, _: Path) -> Callable[[], object]:
    data, body = _picture("PNG"), b"tEXta\0b"
    text = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return _decoded(data[:33] + text * pieces + data[33:])


def _scans(pieces: int, _: Path) -> Callable[[], object]:
    data = _picture("JPEG", 512, progressive=True)
    last = data.rindex(b"\xff\xda")
    return _decoded(data[:last] + data[last:-2] * pieces + data[-2:])


def _markers(marker: bytes) -> Callable[[int, Path], Callable[[], object]]:
    def prepare(pieces: int, _: Path) -> Callable[[], object]:
        data = _picture("JPEG")
        return _decoded(data[:2] + marker * pieces + data[2:])

    return prepare


def _stray(pieces: int, _: Path) -> Callable[[], object]:
    data, segment = _picture("JPEG"), b"\x12\xff\xff\0\xff\xfe\0\2"
    return _decoded(data[:20] + segment * pieces + data[20:])


def _comments(pieces: int, _: Path) -> Callable[[], object]:
    data = _picture("GIF")
    image = data.index(b"\x2c", 13 + 3 * (2 << (data[10] & 7)))
    return _decoded(data[:image] + b"\x21\xfe" + b"\x01a" * pieces + b"\0" + data[image:])


def _pipe(pieces: int, _: Path) -> Callable[[], object]:
    sandbox, body = Sandbox(child.pixels), [b"ab"] * pieces
    child.unpacked(*sandbox(_picture("PNG")))  # it has started
    return lambda: sandbox(*body)


def _tar(pieces: int, folder: Path) -> Callable[[], object]:
    file = folder / "a.tar"
    with tarfile.open(file, "w") as tar:
        for number in range(pieces):
            tar.addfile(tarfile.TarInfo(f"{number:07}.png"))
    return lambda: [count_samples(str(file)), *map(list, _pieces(str(file), pieces))]


def _pieces(uri: str, samples: int) -> Iterator[Iterator[object]]:
    for start in range(0, samples, 256):
        yield read_samples(uri, "caption", start, min(start + 256, samples), None)


CASES: tuple[Case, ...] = (
    Case("PNG of text chunks", 20_000, _png, full=20),
    Case("JPEG of scans", 60, _scans, full=1),
    Case("JPEG of comments", 100_000, _markers(b"\xff\xfe\0\2")),
    Case("JPEG of EXIF segments", 20_000, _markers(b"\xff\xe1\0\x08Exif\0\0")),
    Case("JPEG of stray bytes", 25_000, _stray, full=32),
    Case("GIF of comments", 100_000, _comments, full=4),
    Case("pieces to a decoder", 160_000, _pipe, full=5),
    Case("tar of members", 2_000, _tar, full=20),
)
