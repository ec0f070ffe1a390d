"""The contact sheet: one image with many pictures, by prompt, each prompt below its pictures."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

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
    font = ImageFont.load_default(size=12)
    for number, strip in enumerate(strips):
        left = _GAP + number % columns * (width + _GAP)
        top = _GAP + number // columns * (height + _GAP)
        for place, data in enumerate(strip.pictures):
            _paste(sheet, pen, data, (left + place * (side + _GAP), top), side)
        for line, text in enumerate(_wrapped(strip.caption, font, width)):
            pen.text((left, top + side + 2 + line * _LINE), text, fill=_INK, font=font)
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
    scale = side / max(picture.size)
    if scale != 1:
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        # Small pictures are enlarged without smoothing, so that their pixels can be seen.
        picture = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    sheet.paste(picture, at)


def _wrapped(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Return the text in as many lines as fit, with … where it is cut."""
    # At most the words that could fit, and one more to show that the text continues.
    words, lines = text[: 4 * _LINES * width].split()[: _LINES * width + 1], list[str]()
    while words and len(lines) < _LINES:
        last = len(lines) == _LINES - 1
        line = words.pop(0)
        while words and len(words[0]) <= width and font.getlength(f"{line} {words[0]}") <= width:
            line = f"{line} {words.pop(0)}"
        lines.append(_cut(f"{line} …" if last and words else line, font, width))
    return lines


def _cut(line: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    if len(line) <= width and font.getlength(line) <= width:
        return line
    line = line.removesuffix(" …")[:width]  # no letter is narrower than a pixel
    while line and font.getlength(f"{line}…") > width:
        line = line[:-1]
    return f"{line}…"
