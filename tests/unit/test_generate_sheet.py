"""The contact sheet."""

import io

import pytest
from PIL import Image

from sdp.generate.sheet import Strip, contact_sheet

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture(color: tuple[int, int, int], size: tuple[int, int] = (64, 64)) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", size, color).save(sink, "PNG")
    return sink.getvalue()


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def pixels(image: Image.Image, color: tuple[int, int, int]) -> int:
    return sum(count for count, value in image.getcolors(1 << 24) or [] if value == color)


def test_every_picture_is_on_the_sheet_in_its_full_size_and_below_it_its_caption() -> None:
    strips = [Strip("a red circle", [picture(RED)] * 3), Strip("a blue square", [picture(BLUE)] * 3)]
    sheet = opened(contact_sheet(strips, side=64))
    assert pixels(sheet, RED) == pixels(sheet, BLUE) == 3 * 64 * 64
    plain = opened(contact_sheet([Strip("", strips[0].pictures), Strip("", strips[1].pictures)], side=64))
    assert sheet.size == plain.size
    differing = sum(a != b for a, b in zip(sheet.tobytes(), plain.tobytes(), strict=True))
    assert differing > 200, "the captions are not there"


def test_small_pictures_are_magnified_and_large_ones_reduced_to_the_same_size() -> None:
    strips = [Strip("a", [picture(RED, (8, 8))]), Strip("b", [picture(BLUE, (500, 500))])]
    sheet = opened(contact_sheet(strips, side=128))
    assert pixels(sheet, RED) == pixels(sheet, BLUE) == 128 * 128


def test_a_picture_that_is_not_there_leaves_a_grey_place() -> None:
    sheet = opened(contact_sheet([Strip("a", [picture(RED), None])], side=64))
    assert pixels(sheet, RED) == 64 * 64
    assert pixels(sheet, (0xD8, 0xD8, 0xD8)) > 3000


@pytest.mark.parametrize(("prompts", "pictures"), [(1, 1), (1, 8), (48, 1), (48, 8), (7, 3)])
def test_a_sheet_keeps_a_readable_width(prompts: int, pictures: int) -> None:
    caption = "a very long caption " * 20 + "x" * 400
    sheet = opened(contact_sheet([Strip(caption, [picture(RED)] * pictures)] * prompts, side=256))
    assert sheet.width <= 1300


def test_the_same_pictures_give_the_same_bytes() -> None:
    strips = [Strip("a", [picture(RED)])]
    assert contact_sheet(strips, side=64) == contact_sheet(strips, side=64)


@pytest.mark.parametrize("caption", ["x" * 1_000_000, "日本 " * 300_000, "\u202e\x00\ufffd 🟥", ""])
def test_a_caption_of_any_length_and_alphabet_is_cut_to_its_place(caption: str) -> None:
    """In as little time as any other: with work that grew with the square of its length this would not end."""
    sheet = opened(contact_sheet([Strip(caption, [picture(RED, (128, 128))])], side=128))
    assert sheet.height < 250
    assert pixels(sheet, RED) == 128 * 128
