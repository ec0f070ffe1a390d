"""The synthetic caption–image set."""

import hashlib
import io
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps

from scripts.demo import pictures, shapes
from scripts.demo.shapes import COLORS, dominant_shape_color, encode, is_ring, render, sample

MANY = 3000


def decoded(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return ImageOps.exif_transpose(image)


def first(count: int, **wanted: object) -> list[shapes.Shape]:
    """The first samples whose encoding has these values."""
    result = []
    for i in range(20_000):
        picture = sample(i)
        if all(getattr(picture.encoding, name) == value for name, value in wanted.items()):
            result.append(picture)
            if len(result) == count:
                return result
    raise AssertionError(f"fewer than {count} samples with {wanted}")


def test_samples_are_the_same_in_every_version_and_on_every_machine() -> None:
    # Golden values: changing the samples changes every dataset made from them. The hash is from one machine, and
    # correctly rounded arithmetic has no other answer.
    picture = sample(1)
    assert picture.caption == "a green square on an orange background"
    assert (picture.width, picture.height, picture.path) == (331, 256, "images/000000001.jpg")
    pixels = [shapes.render_array(sample(i), 32) for i in range(40)]
    digest = hashlib.sha256(np.stack(pixels).tobytes()).hexdigest()
    assert digest == "11a761ee6e78232e01f7d902991b3caac9e3798d17e1655ed69f667a9306b4e3"


def test_encodings_are_as_mixed_as_those_of_a_crawl() -> None:
    encodings = [sample(i).encoding for i in range(MANY)]
    share = Counter((how.format, how.mode) for how in encodings)
    assert share["JPEG", "RGB"] > 0.6 * MANY
    for rare in (("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB")):
        assert 0 < share[rare] < 0.12 * MANY, rare
    assert {how.orientation for how in encodings} == set(range(1, 9))
    assert {how.subsampling for how in encodings} == {"4:4:4", "4:2:2", "4:2:0"}
    assert {how.progressive for how in encodings} == {True, False}
    assert {how.lossless for how in encodings} == {True, False}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_transposed_picture_is_upright_after_applying_its_exif_orientation(orientation: int) -> None:
    picture = first(1, format="JPEG", mode="RGB", orientation=orientation)[0]
    image = decoded(encode(picture)[0])
    assert image.size == (picture.width, picture.height)
    small = (picture.width // 8, picture.height // 8)
    seen = np.asarray(image.resize(small, Image.Resampling.BOX), np.float32)
    upright = np.asarray(render(picture).resize(small, Image.Resampling.BOX), np.float32)
    assert np.abs(seen - upright).mean() < 3


def test_the_colour_of_a_shape_is_recognised_at_every_size_and_after_encoding() -> None:
    pictures = [sample(i) for i in range(1000, 1150)]
    for size in (32, 64):
        named = [dominant_shape_color(render(picture, size), picture.background) for picture in pictures]
        assert named == [picture.color for picture in pictures]
    stored = [dominant_shape_color(decoded(encode(picture)[0]), picture.background) for picture in pictures[:12]]
    assert stored == [picture.color for picture in pictures[:12]]


def test_a_picture_without_a_shape_has_the_colour_of_its_background() -> None:
    empty = Image.new("RGB", (64, 64), COLORS["blue"])
    assert dominant_shape_color(empty, "blue") == "blue"
    assert dominant_shape_color(empty, "red") == "blue"


def test_a_ring_is_told_from_all_other_shapes() -> None:
    for picture in map(sample, range(100)):
        assert not is_ring(render(picture, 64), picture.background)
        assert is_ring(render(replace(picture, shape="ring"), 64), picture.background)
    assert not is_ring(Image.new("RGB", (64, 64), COLORS["blue"]), "blue")


def test_the_list_has_laions_columns_and_agrees_with_the_pictures() -> None:
    table = shapes.metadata_table(50, "http://127.0.0.1:8000/", seed=5)
    assert table.schema.names == [
        "URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "hash", "punsafe", "pwatermark", "aesthetic",
    ]  # fmt: skip
    assert table.schema.field("hash").type == pa.int64()
    for i, row in enumerate(table.to_pylist()):
        picture = sample(i, seed=5)
        assert row["URL"] == f"http://127.0.0.1:8000/{picture.path}"
        assert (row["TEXT"], row["WIDTH"], row["HEIGHT"]) == (picture.caption, picture.width, picture.height)
        assert 0 <= row["punsafe"] <= 1
        assert 0 <= row["pwatermark"] <= 1


def test_pictures_without_pillow_end_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert pictures.main([str(tmp_path), "1"]) == 2
    assert "PIL is not installed; pip install '.[worker]'" in capsys.readouterr().err
