"""PNGs that are not whole, made by hand: libraries draw black where rows are missing."""

import struct
import time
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import PngImagePlugin

from sdp.download import image
from sdp.download.image import check
from sdp.imaging import ImageError, decode
from tests.image_rules import image_rules

PASSES = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def rows_of(pixels: NDArray[np.uint8]) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def png(pixels: NDArray[np.uint8], *, interlaced: bool = False, raw: bytes | None = None, split: int = 1) -> bytes:
    height, width = pixels.shape[:2]
    if raw is None:
        raw = rows_of(pixels)
        if interlaced:
            parts = [pixels[top::down, left::across] for left, top, across, down in PASSES]
            raw = b"".join(rows_of(part) for part in parts if part.size)
    packed = zlib.compress(raw)
    step = -(-len(packed) // split)
    data = b"".join(chunk(b"IDAT", packed[at : at + step]) for at in range(0, len(packed), step))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, int(interlaced))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def photo(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (9, 1), (3, 2), (8, 8), (17, 23), (40, 5)])
def test_a_whole_one_is_read_pixel_for_pixel(height: int, width: int, interlaced: bool) -> None:
    pixels = photo(height, width)
    assert np.array_equal(decode(png(pixels, interlaced=interlaced, split=3)).pixels, pixels)


@pytest.mark.parametrize("interlaced", [False, True])
def test_one_whose_pixels_end_early_is_refused_though_every_checksum_is_right(interlaced: bool) -> None:
    pixels = photo(40, 30)
    for missing in (1, 91, 2000):
        raw = rows_of(pixels)[:-missing]
        with pytest.raises(ImageError, match=r"PNG: \d+ of \d+ bytes of pixels") as refused:
            decode(png(pixels, interlaced=interlaced, raw=raw))
        assert refused.value.reason == "undecodable"
    assert check(png(photo(240, 320), raw=rows_of(photo(240, 320)[:100])), image_rules(size=96)).reason == "undecodable"


@pytest.mark.parametrize("kind", [b"IHDR", b"IDAT", b"IEND"])
def test_a_wrong_checksum_is_refused_where_bytes_are_kept_as_they_came(kind: bytes) -> None:
    data = bytearray(png(photo(40, 30)))
    at = data.index(kind)
    (length,) = struct.unpack_from(">I", data, at - 4)
    data[at + 4 + length] ^= 1
    checked = check(bytes(data), image_rules(size=None))
    assert checked.outcome == "failed"
    assert checked.reason in ("undecodable", "not_an_image")


@pytest.mark.parametrize(("max_pixels", "decodings"), [(1199, 0), (1200, 1)])
@pytest.mark.parametrize("size", [None, 16])
def test_an_image_is_decoded_once_after_its_size_was_checked(
    monkeypatch: pytest.MonkeyPatch, max_pixels: int, decodings: int, size: int | None
) -> None:
    monkeypatch.setattr("sdp.imaging.MAX_PIXELS", max_pixels)
    begun = []
    prepare = PngImagePlugin.PngImageFile.load_prepare  # where the memory for the pixels is taken
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load_prepare", lambda picture: begun.append(picture.size) or prepare(picture)
    )
    checked = check(png(photo(40, 30)), image_rules(size=size))
    assert checked.reason == (None if decodings else "too_many_pixels")
    assert len(begun) == decodings


def test_one_that_is_kept_as_it_is_must_be_cheap_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(photo(16, 16))
    costly = data[:33] + chunk(b"tEXt", b"a\0b") * 50_000 + data[33:]
    monkeypatch.setattr(image, "_KEPT_CPU_S", 0.01)
    checked = check(costly, image_rules(size=None))
    assert (checked.outcome, checked.reason) == ("failed", "undecodable")
    assert "CPU time" in (checked.detail or "")
    assert check(costly, image_rules(size=16)).outcome == "written", "it is encoded anew"
    monkeypatch.undo()
    assert check(data, image_rules(size=None)).outcome == "written"


def test_pixels_beyond_those_of_the_header_cost_nothing() -> None:
    pixels = photo(256, 256)
    deflate = zlib.compressobj(9)
    packed = deflate.compress(rows_of(pixels))
    packed += b"".join(deflate.compress(bytes(1 << 24)) for _ in range(20)) + deflate.flush()
    header = struct.pack(">IIBBBBB", 256, 256, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    began = time.process_time()
    assert np.array_equal(decode(data).pixels, pixels)
    small = time.process_time() - began
    began = time.process_time()
    zlib.decompress(packed)
    assert small < 0.2 * (time.process_time() - began)


@pytest.mark.parametrize("rows", range(1024, 1029))
def test_pixels_that_inflate_in_several_steps_are_all_counted(rows: int) -> None:
    assert decode(png(np.zeros((rows, 341, 3), np.uint8))).height == rows  # 1024 bytes a row, 1 MiB a step
