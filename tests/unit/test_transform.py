"""Bytes and captions to uint8 crops and token ids."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sdp.datasets.draws import noise
from sdp.encode.chunk import Chunk
from sdp.encode.recipe import Recipe
from sdp.encode.transform import Transform, bucket_shapes, choose_bucket, crop_image
from sdp.families.tokenizer import load_tokenizer, tokenize
from sdp.imaging import RowError
from sdp.sources.reading import SourceRow
from tests.evaluate_kit import encoded as png
from tests.kit import raising
from tests.process_kit import picture, write_tokenizer

Array = NDArray[np.uint8]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder / "tokenizer")
    return load_tokenizer(folder)


def random_pixels(height: int, width: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def source(row: int, image: bytes | None = None, caption: str | None = "a caption") -> SourceRow:
    return SourceRow(row, f"key{row}", picture(row) if image is None else image, caption)


def transformed(tokenizer: Tokenizer, rows: list[SourceRow], **recipe: object) -> Chunk:
    return Transform(Recipe(**{"resolutions": (64,), **recipe}), tokenizer)(rows)  # type: ignore[arg-type]


# --- crops -----------------------------------------------------------------------------------------------------------


def test_the_centre_square_of_an_image_that_fits_is_copied_pixel_for_pixel() -> None:
    pixels = random_pixels(64, 100)
    _, crop = crop_image(png(pixels), Recipe((64,)), row=1)
    assert np.array_equal(crop[64], pixels[:, 18:82])


def test_256_out_of_512_is_the_mean_of_four_of_its_pixels() -> None:
    pixels = random_pixels(512, 600)
    _, crop = crop_image(png(pixels), Recipe((256, 512)), row=1)
    assert np.array_equal(crop[512], pixels[:, 44:-44])
    fours = pixels[:, 44:-44].reshape(256, 2, 256, 2, 3).astype(int).sum((1, 3))
    assert np.abs(crop[256] - fours / 4).max() <= 0.5  # versions of OpenCV round halves differently


def test_both_resolutions_show_the_same_part_of_the_image() -> None:
    for row in (9, 10, 11):
        _, crop = crop_image(picture(3, 300, 400), Recipe((64, 128), crop="random", seed=5), row=row)
        small = crop[128].reshape(64, 2, 64, 2, 3).mean((1, 3))
        assert np.abs(small - crop[64]).mean() < 1.5


def test_a_random_crop_depends_on_seed_and_row_alone() -> None:
    image = picture(0, 100, 400)
    recipe = Recipe((64,), crop="random", seed=7)
    _, first = crop_image(image, recipe, row=5)
    _, second = crop_image(image, recipe, row=5)
    assert np.array_equal(first[64], second[64])
    _, other_row = crop_image(image, recipe, row=6)
    _, other_seed = crop_image(image, Recipe((64,), crop="random", seed=8), row=5)
    assert len({crop[64].tobytes() for crop in (first, other_row, other_seed)}) == 3


def test_an_image_is_enlarged_so_far_and_no_further() -> None:
    small = png(random_pixels(40, 50))
    _, crop = crop_image(small, Recipe((64,), max_upscale=2.0), row=0)
    assert crop[64].shape == (64, 64, 3)
    with pytest.raises(RowError) as refused:
        crop_image(small, Recipe((64,), max_upscale=1.0), row=0)
    assert refused.value.reason == "too_small"
    with pytest.raises(RowError):
        crop_image(small, Recipe((64, 128), max_upscale=2.0), row=0)


# --- aspect buckets --------------------------------------------------------------------------------------------------


def test_buckets_have_about_the_squares_area_and_even_sides() -> None:
    shapes = bucket_shapes(512)
    assert (512, 512) in shapes
    assert sorted(shapes) == sorted((tall, wide) for wide, tall in shapes)
    assert all(wide % 64 == 0 and tall % 64 == 0 for wide, tall in shapes)
    assert all(0.85 * 512**2 <= wide * tall <= 512**2 for wide, tall in shapes)
    assert [(w // 4, h // 4) for w, h in shapes] == bucket_shapes(128), "one numbering for all resolutions"


@pytest.mark.parametrize(("width", "height"), [(100, 100), (300, 200), (200, 300), (900, 200), (50, 1000), (512, 500)])
def test_an_image_goes_to_the_bucket_of_the_nearest_aspect(width: int, height: int) -> None:
    aspects = [wide / tall for wide, tall in bucket_shapes(64)]
    nearest = min(aspects, key=lambda aspect: max(aspect / (width / height), (width / height) / aspect))
    assert aspects[choose_bucket(width, height)] == nearest


def test_a_bucket_keeps_nearly_all_of_the_image() -> None:
    pixels = np.zeros((200, 500, 3), np.uint8)
    pixels[:, :60] = (255, 0, 0)
    pixels[:, -60:] = (0, 0, 255)
    bucket, crop = crop_image(png(pixels), Recipe((64,), crop="buckets"), row=0)
    wide, tall = bucket_shapes(64)[bucket]
    assert crop[64].shape == (tall, wide, 3)
    assert crop[64][:, 1].tolist() == [[255, 0, 0]] * tall
    assert crop[64][:, -2].tolist() == [[0, 0, 255]] * tall


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_a_chunk_holds_uint8_pixels_and_each_rows_tokens(tokenizer: Tokenizer) -> None:
    chunk = transformed(tokenizer, [source(5, caption="a cat"), source(8, caption="猫 🐈")])
    assert chunk.rows.tolist() == [5, 8]
    assert chunk.keys == ["key5", "key8"]
    (group,) = chunk.crops[64]
    assert group.values.dtype == np.uint8
    assert group.values.shape == (2, 64, 64, 3)
    _, crop = crop_image(picture(8), Recipe((64,)), row=8)
    assert np.array_equal(group.values[1], crop[64])
    assert chunk.tokens.dtype == np.uint32
    assert np.array_equal(chunk.tokens, tokenize(tokenizer, ["a cat", "猫 🐈"]))


def test_unusable_rows_keep_their_reason_and_delay_no_others(tokenizer: Tokenizer) -> None:
    rows = [
        source(0),
        source(1, b"\xff\xd8\xff but not really"),
        source(2, caption=""),
        source(3, caption=" \n\t "),
        source(4, caption=None),
        source(5, picture(5)[:500]),
        SourceRow(6, "key6", None, "no image"),
        source(7, png(random_pixels(3, 3))),
        source(8),
    ]
    chunk = transformed(tokenizer, rows)
    assert chunk.rows.tolist() == [0, 8]
    reasons = {1: "undecodable", 5: "undecodable", 6: "empty", 7: "too_small"}
    assert {o.row: o.reason for o in chunk.outcomes} == reasons | dict.fromkeys([2, 3, 4], "no_caption")
    assert len(chunk.crops[64][0].values) == len(chunk.tokens) == 2


def test_an_error_of_our_own_is_recorded_for_its_row(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.encode.transform.crop_image", raising(KeyError("surprise")))
    (outcome,) = transformed(tokenizer, [source(1)]).outcomes
    assert (outcome.reason, outcome.detail) == ("internal", "KeyError: 'surprise'")


def test_rows_on_a_takedown_list_are_filtered_undecoded(tokenizer: Tokenizer) -> None:
    chunk = Transform(Recipe((64,)), tokenizer, {3: "tombstone"}.get)([source(2), source(3, b"never looked at")])
    assert chunk.rows.tolist() == [2]
    assert [(o.row, o.outcome, o.reason) for o in chunk.outcomes] == [(3, "filtered", "tombstone")]

    filtered = replace(source(4, b"never looked at"), filtered="score:aesthetic")
    (outcome,) = transformed(tokenizer, [filtered]).outcomes
    assert (outcome.row, outcome.outcome, outcome.reason) == (4, "filtered", "score:aesthetic")


def test_crops_of_one_shape_are_grouped_and_know_whose_they_are(tokenizer: Tokenizer) -> None:
    rows = [source(n, picture(n, *size)) for n, size in enumerate([(100, 300), (100, 100), (100, 290), (300, 100)])]
    chunk = transformed(tokenizer, rows, crop="buckets")
    groups = {tuple(group.positions.tolist()): group.values.shape[1:3] for group in chunk.crops[64]}
    assert sorted(groups) == [(0, 2), (1,), (3,)]
    assert groups[1,] == (64, 64)
    assert chunk.buckets[0] == chunk.buckets[2] != chunk.buckets[1]


def test_noise_belongs_to_the_row_and_no_two_share_it() -> None:
    rows = np.array([7, 8, 7])
    drawn = noise(1, rows, (4, 8, 8), resolution=64)
    assert np.array_equal(drawn[0], drawn[2])
    alone = noise(1, rows[1:2], (4, 8, 8), resolution=64)
    assert np.array_equal(drawn[1], alone[0])
    seeded, larger = (noise(seed, rows[:1], (4, 8, 8), resolution=side) for seed, side in ((2, 64), (1, 128)))
    assert len({values.tobytes() for values in (*drawn[:2], *seeded, *larger)}) == 4


def test_noise_is_standard_normal_and_never_changes() -> None:
    drawn = noise(3, np.arange(64), (4, 8, 8), resolution=64)
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.02
    # Written down when this was made: a stored dataset could not be completed with other numbers.
    assert np.allclose(drawn[0, 0, 0, :3], (0.0201091, 1.8738416, 2.1177385), atol=1e-6)
