"""PNGs that are not whole, or cost more than their pixels, made by hand."""

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


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def rows_of(pixels: NDArray[np.uint8]) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def png(pixels: NDArray[np.uint8], packed: bytes = b"") -> bytes:
    height, width = pixels.shape[:2]
    data = chunk(b"IDAT", packed or zlib.compress(rows_of(pixels)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def photo(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("without", [12, 13, 400])
def test_one_without_its_end_is_refused(without: int) -> None:
    with pytest.raises(ImageError, match="PNG: ") as refused:
        decode(png(photo(40, 30))[:-without])
    assert refused.value.reason == "undecodable"


@pytest.mark.parametrize("kind", [b"IHDR", b"IDAT"])
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
    data = png(pixels, packed)
    began = time.process_time()
    assert np.array_equal(decode(data).pixels, pixels)
    small = time.process_time() - began
    began = time.process_time()
    zlib.decompress(packed)
    assert small < 0.2 * (time.process_time() - began)
