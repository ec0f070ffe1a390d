"""Checking images: what comes out is whole, upright, RGB and of the right size; what is not is refused."""

import hashlib
import io

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from scripts.demo import shapes
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN
from sdp.download.image import Checked, ImageRules, check
from tests.image_rules import image_rules
from tests.kit import raising
from tests.misbehaving.bodies import huge_jpeg

SQUARE = image_rules(size=64, crop=True)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format, **options)
    return sink.getvalue()


def pixels_of(checked: Checked) -> np.ndarray:
    assert checked.outcome == WRITTEN, checked
    assert checked.data is not None
    with Image.open(io.BytesIO(checked.data)) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


@pytest.mark.parametrize("index", range(40))
def test_every_kind_of_image_in_a_crawl_keeps_its_content(index: int) -> None:
    drawn = shapes.sample(index)
    data, _, _ = shapes.encode(drawn)
    checked = check(data, SQUARE)
    pixels = pixels_of(checked)
    assert pixels.shape == (64, 64, 3)
    assert (checked.width, checked.height) == (64, 64)
    assert (checked.original_width, checked.original_height) == (drawn.width, drawn.height)
    assert checked.sha256 == hashlib.sha256(data).hexdigest()
    assert shapes.dominant_shape_color(pixels, drawn.background) == drawn.color


def test_a_jpeg_that_is_kept_as_it_is_is_decoded_at_the_scale_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    whole = simplejpeg.decode_jpeg
    monkeypatch.setattr(
        simplejpeg,
        "decode_jpeg",
        lambda *args, **options: sizes.append((pixels := whole(*args, **options)).shape) or pixels,
    )
    assert check(encoded(Image.new("RGB", (320, 240)), "JPEG"), image_rules()).outcome == WRITTEN
    assert sizes == [(240, 320, 3)]


@pytest.mark.parametrize(
    ("width", "height", "rules", "expected"),
    [
        (300, 200, image_rules(size=64), (96, 64)),
        (200, 300, image_rules(size=64), (64, 96)),
        (200, 300, image_rules(size=64, crop=True), (64, 64)),
        (1000, 10, image_rules(size=64), (1000, 10)),
        (1000, 10, image_rules(size=5), (500, 5)),
        (50, 40, image_rules(size=64), (50, 40)),
        (50, 40, image_rules(size=64, crop=True), (40, 40)),
        (50, 40, image_rules(size=64, enlarge=True), (80, 64)),
        (50, 40, image_rules(size=64, crop=True, enlarge=True), (64, 64)),
        (64, 64, image_rules(size=64), (64, 64)),
        (129, 127, image_rules(size=64), (65, 64)),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_the_shorter_side_gets_its_size(
    width: int, height: int, rules: ImageRules, expected: tuple[int, int], format: str
) -> None:
    checked = check(encoded(Image.new("RGB", (width, height), (9, 99, 199)), format), rules)
    pixels = pixels_of(checked)
    assert (pixels.shape[1], pixels.shape[0]) == (checked.width, checked.height) == expected
    assert (checked.original_width, checked.original_height) == (width, height)


def test_the_crop_is_from_the_centre() -> None:
    image = Image.new("RGB", (300, 100), (250, 0, 0))
    image.paste((0, 0, 250), (100, 0, 200, 100))
    pixels = pixels_of(check(encoded(image), SQUARE))
    assert np.abs(pixels[:, 2:-2].mean((0, 1)) - (0, 0, 250)).max() <= 8


def test_original_bytes_are_kept_and_decoded_all_the_same() -> None:
    good = encoded(shapes.render(shapes.sample(1), 200), "JPEG")
    checked = check(good, image_rules())
    assert (checked.outcome, checked.data, checked.width, checked.height) == (WRITTEN, None, 200, 200)
    for bad in (good[: len(good) // 2], good[:-2], good[:-200]):
        assert check(bad, image_rules()).reason == "undecodable"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
        (encoded(Image.new("RGB", (50, 40)), "TIFF"), "not_an_image"),
        (b"\xff\xd8\xff\xe0" + b"\x00" * 100, "undecodable"),
        (huge_jpeg(65_000, 65_000), "too_many_pixels"),
    ],
    ids=str,
)
def test_invalid_images_are_refused_with_their_reason(data: bytes, reason: str) -> None:
    checked = check(data, SQUARE)
    assert (checked.outcome, checked.reason) == (FAILED, reason)
    assert checked.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "AVIF"])
def test_too_many_pixels_are_refused_before_they_are_decoded(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = encoded(Image.effect_noise((400, 300), 50).convert("RGB"), format)
    # Of half an image the decoding would end otherwise; WebP and AVIF do not even open without the rest.
    part = complete if format in ("WEBP", "AVIF") else complete[: len(complete) // 2]
    monkeypatch.setattr("sdp.imaging.MAX_PIXELS", 119_999)
    assert check(part, image_rules()).reason == "too_many_pixels"
    monkeypatch.setattr("sdp.imaging.MAX_PIXELS", 120_000)
    assert check(complete, image_rules()).outcome == WRITTEN


def test_sides_and_shapes_that_the_rules_do_not_want_are_left_out_undecoded() -> None:
    def verdict(width: int, height: int, **rules: float) -> tuple[str, str | None]:
        data = encoded(Image.new("RGB", (width, height)))
        checked = check(data[:60] if rules else data, image_rules(size=64, **rules))
        return checked.outcome, checked.reason

    assert verdict(300, 7) == (FAILED, "too_small")
    assert verdict(300, 20, min_side=30) == (FILTERED, "min_size")
    assert verdict(300, 20, max_aspect=10) == (FILTERED, "aspect")
    assert verdict(20, 300, max_aspect=10) == (FILTERED, "aspect")
    assert verdict(300, 30, max_aspect=10, min_side=30)[0] != FILTERED
    assert verdict(8, 8) == (WRITTEN, None)


def test_a_webp_of_too_many_pixels_is_refused_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Image.effect_noise((400, 300), 50)
    webps = [
        encoded(noise.convert("RGB"), "WEBP"),
        encoded(noise.convert("RGB"), "WEBP", lossless=True),
        encoded(noise.convert("RGBA"), "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
    ]
    assert [data[12:16] for data in webps] == [b"VP8 ", b"VP8L", b"VP8X"]
    for data in webps:
        assert check(data, image_rules()).outcome == WRITTEN
    monkeypatch.setattr("sdp.imaging.MAX_PIXELS", 119_999)
    monkeypatch.setattr(Image, "open", None)
    for data in webps:
        assert check(data, image_rules()).detail == "400 × 300 pixels, more than 119999"


LACKING: dict[str, tuple[str, Exception]] = {
    "JPEG": ("simplejpeg.decode_jpeg", ValueError("Insufficient memory (case 4)")),
    "the encoder": ("simplejpeg.encode_jpeg", ValueError("Insufficient memory (case 4)")),
    "OpenCV": ("cv2.resize", cv2.error("std::bad_alloc")),
    "OpenCV's allocator": ("cv2.resize", cv2.error("(-4:Insufficient memory) Failed to allocate 9 bytes")),
    "Pillow": ("PIL.ImageFile.ImageFile.load", MemoryError()),
    "Pillow's decoders": ("PIL.ImageFile.ImageFile.load", OSError("out of memory error when reading image file")),
}


@pytest.mark.parametrize("who", LACKING)
def test_an_image_too_large_for_memory_is_not_called_corrupt(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    where, error = LACKING[who]
    format = "PNG" if who in ("Pillow", "Pillow's decoders") else "JPEG"
    data = encoded(shapes.render(shapes.sample(1), 150), format)
    monkeypatch.setattr(where, raising(error))
    checked = check(data, image_rules(size=64))
    assert (checked.outcome, checked.reason) == (FAILED, "no_memory")
    assert checked.detail == f"no memory for 150 × 150 pixels of {format} within its limit"
