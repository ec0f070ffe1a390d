"""Whatever bytes and captions come, each address ends as crops or as a reason, and its neighbours do not notice."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import CLIPTokenizer

from sdp.datasets.outcomes import FAILURE_REASONS
from sdp.encode.chunk import Chunk, SourceRow
from sdp.encode.recipe import Recipe
from sdp.encode.transform import Transform, bucket_shapes
from sdp.model.load import load_tokenizer
from tests.misbehaving import bodies
from tests.process_kit import picture, write_tokenizer

MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "GIF": ("1", "L", "P"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "F"),
}
BEGINNINGS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a",
    b"RIFF\0\0\0\0WEBP",
    b"BM",
    b"II*\0",
    b"<svg ",
    b"%!PS",
    b"",
)
CAPTIONS = (
    st.none() | st.text(max_size=40) | st.sampled_from(["\0", "a" * 5000, "🏳️‍🌈" * 90, "<|endoftext|> <|startoftext|>"])
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder / "tokenizer")
    return load_tokenizer(folder)


@st.composite
def recipes(draw: Any) -> Recipe:
    return Recipe(
        resolutions=draw(st.sampled_from([(64,), (128,), (64, 128), (128, 64)])),
        crop=draw(st.sampled_from(["center", "random", "buckets"])),
        seed=draw(st.integers(0, 2**63)),
        max_upscale=draw(st.sampled_from([2.0, 5.0, 1000.0])),
    )


@st.composite
def whole_images(draw: Any) -> bytes:
    """An image of any kind, mode, size and orientation, that a decoder may well like."""
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    sides = st.integers(1, 200) | st.sampled_from([1, 2, 7, 8, 64, 128, 600])
    width, height = draw(sides), draw(sides)
    pixels = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, (height, width, 3), np.uint8)
    if mode in ("I;16", "F"):
        image = Pillow.fromarray(pixels[..., 0].astype(np.uint16 if mode == "I;16" else np.float32))
    elif mode == "LAB":
        image = Pillow.fromarray(pixels, "LAB")
    elif mode == "LA":
        image = Pillow.fromarray(pixels).convert("RGBA").convert("LA")
    else:
        image = Pillow.fromarray(pixels).convert(mode)
    options: dict[str, Any] = {}
    if kind in ("JPEG", "PNG", "WEBP", "TIFF") and draw(st.booleans()):
        exif = Pillow.Exif()
        exif[0x0112] = draw(st.integers(0, 9))
        options["exif"] = exif.tobytes()
    if kind == "JPEG":
        options |= {"progressive": draw(st.booleans()), "quality": draw(st.sampled_from([1, 75, 100]))}
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


@st.composite
def damaged_images(draw: Any) -> bytes:
    data = bytearray(draw(whole_images()))
    for where, value in draw(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=30)):
        data[int(where * (len(data) - 1))] = value
    return bytes(data[: int(draw(st.floats(0, 1)) * len(data))]) + draw(st.binary(max_size=20))


@st.composite
def junk(draw: Any) -> bytes:
    return draw(st.sampled_from(BEGINNINGS)) + draw(st.binary(max_size=300))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recipe=recipes(), data=whole_images() | damaged_images() | junk() | st.none(), caption=CAPTIONS)
def test_a_hostile_row_is_crops_or_a_reason_and_its_neighbours_are_as_without_it(
    tokenizer: CLIPTokenizer, recipe: Recipe, data: bytes | None, caption: str | None
) -> None:
    transform = Transform(recipe, tokenizer)
    before, after = (SourceRow(row, "", picture(row, 100, 120), f"number {row}") for row in (4, 6))
    chunk = transform([before, SourceRow(5, "", data, caption), after])
    assert set(chunk.rows.tolist()) | {outcome.row for outcome in chunk.outcomes} == {4, 5, 6}
    assert {outcome.row for outcome in chunk.outcomes} in (set(), {5})
    for outcome in chunk.outcomes:
        assert outcome.reason in FAILURE_REASONS
        assert outcome.reason not in ("internal", "crashed"), outcome.detail
    alone = transform([before, after])
    for side in recipe.resolutions:
        assert pixels_of(chunk, side, {4, 6}) == pixels_of(alone, side, {4, 6})
        for group in chunk.crops[side]:
            assert group.values.dtype == np.uint8
            shape = group.values.shape[1:]
            assert shape in {(tall, wide, 3) for wide, tall in bucket_shapes(side)}
            assert recipe.crop == "buckets" or shape == (side, side, 3)
    assert chunk.tokens.shape == (len(chunk.rows), 77)


def pixels_of(chunk: Chunk, side: int, rows: set[int]) -> dict[int, bytes]:
    return {
        int(chunk.rows[item]): values.tobytes()
        for group in chunk.crops[side]
        for item, values in zip(group.positions.tolist(), group.values, strict=True)
        if int(chunk.rows[item]) in rows
    }


@pytest.mark.parametrize("bomb", [bodies.huge_png, bodies.huge_gif, bodies.huge_jpeg])
def test_a_bomb_is_a_reason_and_takes_no_memory(tokenizer: CLIPTokenizer, bomb: Any) -> None:
    (outcome,) = Transform(Recipe((64,)), tokenizer)([SourceRow(1, "", bomb(30_000, 30_000), "boom")]).outcomes
    assert outcome.reason == "too_many_pixels"
