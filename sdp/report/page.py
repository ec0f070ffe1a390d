"""What a report consists of, and its rendering by page.html: one file that needs no script, style sheet or network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sdp.charts import render as render_template

_CAPTION = 400
"""Characters of a caption that are shown."""


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1, with a bar that compares it with the largest of its column."""

    of_whole: float
    largest: float = 1.0


Cell = str | int | float | Share


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; numbers are aligned to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A picture with its text."""

    data: bytes | None
    """Encoded; None where there is no picture to show."""
    caption: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side."""

    title: str
    tiles: Sequence[Tile]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart or a profile's timeline as SVG."""

    title: str
    svg: str
    half: bool = False
    """Half the page's width: two of them stand side by side."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar cut into shares: name, size, explanation."""

    title: str
    parts: Sequence[tuple[str, float, str]]
    colours: str = "abcdef"
    half: bool = False


@dataclass(frozen=True, slots=True)
class Strips:
    """Named rows of pictures."""

    title: str
    rows: Sequence[tuple[str, Sequence[Tile]]]


@dataclass(frozen=True, slots=True)
class Folded:
    """Text that the reader can unfold."""

    title: str
    text: str


Block = Table | Gallery | Strips | Drawing | Bar | Folded


def listing(title: str, lines: Sequence[str], header: str = "what") -> list[Block]:
    """Return a table of one column, at most 50 lines long; none where there are no lines."""
    return [Table(title, (header,), [(line,) for line in lines[:50]])] if lines else []


@dataclass(frozen=True, slots=True)
class Section:
    """The report of one dataset, run or evaluation."""

    title: str
    uri: str
    verdict: str
    """The outcome in one sentence."""
    good: bool = True
    figures: Sequence[tuple[str, str]] = ()
    """The few numbers that matter: name and value."""
    blocks: Sequence[Block] = ()
    glance: str = ""
    """The line at the top of the page: how much, how fast."""


def render(title: str, sections: Sequence[Section], written: str) -> str:
    """Return the page; `written` says when and by what version."""
    values = {"title": title, "sections": sections, "written": written, "cut": _cut, "data_uri": _data_uri}
    return render_template(Path(__file__).with_suffix(".html"), values | {"kind": lambda block: type(block).__name__})


def _cut(text: str) -> str:
    return text if len(text) <= _CAPTION else f"{text[: _CAPTION - 1]}…"


def _data_uri(picture: bytes) -> str:
    kind = "jpeg" if picture[:3] == b"\xff\xd8\xff" else "webp" if picture[8:12] == b"WEBP" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
