"""Bytes to upright RGB pixels and crops: exact where nothing is resampled, near Lanczos where it is, never a crash."""

import io
import struct
import time
import zlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps

from sdp.imaging import Box, ImageError, centre_box, cut, decode, placed_box, read_header, shrink
from sdp.imaging.containers import exif_orientation

Array = NDArray[np.uint8]


def encoded(pixels: Array, kind: str = "PNG", **options: object) -> bytes:
    sink = io.BytesIO()
    Pillow.fromarray(pixels).save(sink, kind, **options)
    return sink.getvalue()


def ramp(height: int, width: int) -> Array:
    """Return an image whose red grows to the right and green downwards, so that a pixel shows its position."""
    red = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    green = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return np.stack([red, green, np.full((height, width), 128.0)], -1).round().astype(np.uint8)


def photo(height: int, width: int, seed: int = 0) -> Array:
    """Noise with the spectrum of photographs, and some edges."""
    draw = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    fall = np.sqrt(down**2 + across**2)
    fall[0, 0] = 1
    planes = []
    for _ in range(4):
        plane = np.fft.irfft2(np.fft.rfft2(draw.normal(size=(height, width))) / fall**1.45, s=(height, width))
        planes.append((plane - plane.mean()) / plane.std())
    picture = np.stack([planes[0] + 0.35 * plane for plane in planes[1:]], -1) * 45 + 128
    for _ in range(8):
        top, left = draw.integers(0, height), draw.integers(0, width)
        picture[top : top + draw.integers(30, 200), left : left + draw.integers(30, 200)] += draw.normal(size=3) * 30
    return np.clip(picture, 0, 255).astype(np.uint8)


def psnr(a: Array, b: Array) -> float:
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def lanczos(data: bytes, box: Box, side: int) -> Array:
    picture = Pillow.open(io.BytesIO(data)).convert("RGB")
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    return np.asarray(picture.resize((side, side), Pillow.Resampling.LANCZOS, box=edges))


# --- decoding --------------------------------------------------------------------------------------------------------


def test_a_jpeg_is_decoded_as_by_pillow() -> None:
    data = encoded(photo(200, 300), "JPEG", quality=95)
    expected = np.asarray(Pillow.open(io.BytesIO(data)).convert("RGB"))
    assert psnr(decode(data).pixels, expected) > 50


@pytest.mark.parametrize("min_side", [1, 64, 100, 128, 200, 256, 399, 400, 1000])
def test_a_large_jpeg_comes_no_smaller_than_asked_and_no_larger_than_it_is(min_side: int) -> None:
    image = decode(encoded(photo(400, 600), "JPEG"), min_side=min_side)
    shorter = min(image.pixels.shape[:2])
    assert min(min_side, 400) <= shorter <= 400
    assert (image.width, image.height) == (600, 400)
    assert image.pixels.shape[:2] == (-(-400 * image.scale // 1), -(-600 * image.scale // 1))
    if min_side == 100:
        assert image.scale == 0.25, "a larger decode than needed costs time"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_exif_orientation_is_turned_upright(orientation: int, kind: str) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    data = encoded(ramp(64, 96), kind, exif=exif.tobytes())
    upright = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))).convert("RGB"))
    image = decode(data)
    assert (image.height, image.width) == upright.shape[:2]
    assert np.abs(image.pixels.astype(int) - upright).max() <= 2
    header = read_header(data)
    assert (header.height, header.width) == upright.shape[:2]


def exif_segment(orientation: int) -> bytes:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif


def test_the_first_exif_data_before_the_pixels_counts_as_in_chromium() -> None:
    plain = encoded(ramp(64, 96), "JPEG")
    for orientations, expected in (((6, 1), 6), ((1, 6), 1)):
        segments = b"".join(map(exif_segment, orientations))
        assert read_header(plain[:2] + segments + plain[2:]).orientation == expected
    plain = encoded(ramp(64, 96), "PNG")
    first, second = (
        struct.pack(">I", len(tags)) + b"eXIf" + tags + struct.pack(">I", zlib.crc32(b"eXIf" + tags))
        for tags in (exif_segment(orientation)[10:] for orientation in (6, 8))
    )
    assert read_header(plain[:33] + first + second + plain[33:]).orientation == 6
    late = plain[:-12] + first + plain[-12:]
    assert read_header(late).orientation == decode(late).pixels.shape[0] // 64 == 1


@pytest.mark.parametrize("marker", ["e0", "e1", "fe", "db", "c0", "c4", "dd", "da"])
@pytest.mark.parametrize("stray", [b"\0", b"\x12\x34", b"\xff\0" * 3, b"\xff" * 5], ids=["0", "two", "stuffed", "fill"])
def test_bytes_between_segments_of_a_jpeg_are_passed_over_as_by_browsers(marker: str, stray: bytes) -> None:
    options = {"comment": b"c", "restart_marker_rows": 1, "quality": 90}
    plain = encoded(photo(64, 96), "JPEG", **options)
    whole = plain[:2] + b"\xff\xe0\0\x02" + exif_segment(6) + plain[2:]  # a browser knows it by its first three bytes
    at = whole.index(bytes.fromhex(f"ff{marker}"), 6)
    image, expected = decode(whole[:at] + stray + whole[at:]), decode(whole)
    assert np.array_equal(image.pixels, expected.pixels)
    assert (image.width, image.height) == (64, 96)


def test_fill_bytes_and_segments_without_end_take_no_longer_than_their_length() -> None:
    for hostile in (b"\xff" * 4_000_000 + b"\0", b"\xff\xe1\0\0" * 1_000_000, b"\xff\xda\0\x02" * 250):
        began = time.process_time()
        with pytest.raises(ImageError):
            decode(b"\xff\xd8\xff\xe0\0\x02" + hostile)
        assert time.process_time() - began < 3


def test_broken_exif_tags_beside_the_orientation_print_nothing(recwarn: pytest.WarningsRecorder) -> None:
    tags = [(0x010F, 2, 9_999, 9_999), (0x0112, 3, 1, 6)]
    exif = b"II*\0\x08\0\0\0\x02\0" + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    assert exif_orientation(exif) == 6
    assert not recwarn.list


@pytest.mark.parametrize("order", ["II", "MM"])
def test_broken_exif_means_upright(order: str) -> None:
    exif = b"Exif\0\0" + order.encode() + b"\xff" * 20
    plain = encoded(ramp(16, 24), "JPEG")
    data = plain[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + plain[2:]
    assert decode(data).pixels.shape == (16, 24, 3)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded() -> None:
    data = encoded(photo(64, 64), "JPEG", progressive=True)
    scan = data[data.index(b"\xff\xda") : data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)]
    assert decode(data).pixels.shape == (64, 64, 3)
    with pytest.raises(ImageError) as refused:
        decode(data[:-2] + scan * 400 + data[-2:])
    assert refused.value.reason == "undecodable"


SAMPLES = {kind: encoded(photo(40, 56), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")}
SAMPLES["progressive"] = encoded(photo(40, 56), "JPEG", progressive=True)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(sorted(SAMPLES)),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=20),
    cut_at=st.floats(0.02, 1),
)
def test_damaged_bytes_give_an_image_or_a_reason_and_nothing_else(
    kind: str, changes: list[tuple[float, int]], cut_at: float
) -> None:
    data = bytearray(SAMPLES[kind])
    for where, value in changes:
        data[int(where * (len(data) - 1))] = value
    try:
        with mock.patch("sdp.imaging.MAX_PIXELS", 1_000_000):
            image = decode(bytes(data[: max(1, int(cut_at * len(data)))]), min_side=16)
    except ImageError:
        return
    crop = cut(image, centre_box(image.width, image.height), 16, 16)
    assert crop.shape == (16, 16, 3)
    assert crop.dtype == np.uint8


# --- cutting ---------------------------------------------------------------------------------------------------------


def test_a_crop_that_needs_no_resizing_is_a_copy() -> None:
    pixels = photo(64, 100)
    crop = cut(decode(encoded(pixels)), centre_box(100, 64), 64, 64)
    assert np.array_equal(crop, pixels[:, 18:82])


def test_boxes_are_the_largest_of_their_aspect() -> None:
    assert centre_box(100, 64) == Box(18, 0, 64, 64)
    assert centre_box(64, 101) == Box(0, 18.5, 64, 64)
    assert centre_box(100, 64, 2.0) == Box(0, 7, 100, 50)
    assert placed_box(100, 64, 0.0, 0.7) == Box(0, 0, 64, 64)
    assert placed_box(100, 64, 1.0, 0.7) == Box(36, 0, 64, 64)


@pytest.mark.parametrize(
    ("height", "width"), [(790, 953), (512, 512), (257, 900), (600, 300), (300, 301), (2000, 1100)]
)
@pytest.mark.parametrize("side", [64, 256])
def test_a_crop_lies_where_it_should_to_half_a_pixel(height: int, width: int, side: int) -> None:
    image = decode(encoded(ramp(height, width), "JPEG", quality=98, subsampling=0), min_side=side)
    box = placed_box(width, height, 0.3, 0.8)
    crop = cut(image, box, side, side).astype(np.float64)
    middle = (np.arange(side) + 0.5) * (box.width / side) - 0.5
    red, green = (box.left + middle) * 255 / (width - 1), (box.top + middle) * 255 / (height - 1)
    inner = slice(2, -2)
    off_x = np.mean(crop[inner, inner, 0] - red[None, inner]) / 255 * (width - 1) / (box.width / side)
    off_y = np.mean(crop[inner, inner, 1] - green[inner, None]) / 255 * (height - 1) / (box.height / side)
    assert max(abs(off_x), abs(off_y)) < 0.5 / (box.width * image.scale / side) + 0.1


@pytest.mark.parametrize(("height", "width"), [(790, 953), (640, 480), (300, 400), (1200, 1600)])
def test_crops_are_within_40_db_of_lanczos(height: int, width: int) -> None:
    data = encoded(photo(height, width), "JPEG", quality=92)
    box = centre_box(width, height)
    assert psnr(cut(decode(data, min_side=256), box, 256, 256), lanczos(data, box, 256)) > 40


@pytest.mark.parametrize(("side", "least_db"), [(512, 42), (575, 40)])
def test_shrinking_is_close_to_lanczos(side: int, least_db: float) -> None:
    pixels = photo(side, side)
    expected = np.asarray(Pillow.fromarray(pixels).resize((256, 256), Pillow.Resampling.LANCZOS))
    assert psnr(shrink(pixels, 256, 256), expected) > least_db
