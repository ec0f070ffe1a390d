"""The contact sheet: one image with many pictures, by prompt, each prompt below its pictures."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont, ImageOps

_WIDTH = 1280
"""Approximate width of a sheet in pixels."""
_GAP, _LINE, _LINES = 8, 16, 2
_PAPER, _INK, _NOTHING = "white", "#222222", "#d8d8d8"


@dataclass(frozen=True, slots=True)
class Strip:
    """A prompt and its encoded pictures; None for a missing one."""

    caption: str
    pictures: Sequence[bytes | None]


def contact_sheet(strips: Sequence[Strip], side: int) -> bytes:
    """Return a PNG of all strips, each picture at most `side` pixels wide and high."""
    side = min(side, _WIDTH // max((len(strip.pictures) for strip in strips), default=1) - _GAP)
    most = max((len(strip.pictures) for strip in strips), default=1)
    width = most * (side + _GAP) - _GAP
    height = side + _LINES * _LINE + _GAP
    columns = max(1, min(len(strips), (_WIDTH + _GAP) // (width + _GAP)))
    lines = -(-len(strips) // columns)
    sheet = Image.new("RGB", (columns * (width + _GAP) + _GAP, lines * (height + _GAP) + _GAP), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, strip in enumerate(strips):
        left = _GAP + number % columns * (width + _GAP)
        top = _GAP + number // columns * (height + _GAP)
        for place, data in enumerate(strip.pictures):
            _paste(sheet, pen, data, (left + place * (side + _GAP), top), side)
        sheet.paste(_label(strip.caption, width), (left, top + side + 2))
    sink = io.BytesIO()
    sheet.save(sink, "PNG")
    return sink.getvalue()


def _paste(sheet: Image.Image, pen: ImageDraw.ImageDraw, data: bytes | None, at: tuple[int, int], side: int) -> None:
    left, top = at
    if data is None:
        pen.rectangle((left, top, left + side - 1, top + side - 1), fill=_NOTHING)
        pen.line((left, top, left + side - 1, top + side - 1), fill=_PAPER, width=2)
        return
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("RGB")
    # Small pictures are enlarged without smoothing, so that their pixels can be seen.
    method = Image.Resampling.NEAREST if max(picture.size) < side else Image.Resampling.LANCZOS
    sheet.paste(ImageOps.contain(picture, (side, side), method), at)


def _label(caption: str, width: int) -> Image.Image:
    """Return the caption as a picture, with … where it is cut."""
    font = ImageFont.load_default(size=12)
    letters = round(width / font.getlength("n"))
    # At most the letters that could fit, and one more to show that the text continues.
    lines = textwrap.wrap(caption[: 2 * _LINES * letters], letters, max_lines=_LINES, placeholder=" …")
    label = Image.new("RGB", (width, _LINES * _LINE), _PAPER)
    pen = ImageDraw.Draw(label)
    for number, line in enumerate(lines):
        pen.text((0, number * _LINE), line, fill=_INK, font=font)
    return label
