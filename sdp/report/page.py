"""Descriptions in sections of blocks, printed as text or as one HTML page (page.html).

The page has no scripts, and needs no style sheets and no network access.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import sdp
from sdp import console
from sdp.charts import render


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1, with a bar relative to the largest in its column."""

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

    data: bytes
    """The encoded picture."""
    caption: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side."""

    title: str
    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Svg:
    """A chart."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar divided into parts: name, size, the size in words."""

    title: str
    parts: Sequence[tuple[str, float, str]]
    colours: str = "abcdef"

    @property
    def whole(self) -> float:
        return sum(size for _, size, _ in self.parts) or 1.0


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


Block = Table | Gallery | Strips | Svg | Bar | Folded


@dataclass(frozen=True, slots=True)
class PageSection:
    """The description of one dataset, run, checkpoint or evaluation."""

    title: str
    uri: str
    verdict: str
    """The outcome in one sentence."""
    good: bool = True
    figures: Sequence[tuple[str, str]] = ()
    """The most important numbers: name and value; an empty one is not shown."""
    blocks: Sequence[Block] = ()

    @property
    def shown(self) -> list[Block]:
        """The blocks that have rows or parts."""
        return [block for block in self.blocks if getattr(block, "rows", True) and getattr(block, "parts", True)]


def listing(title: str, lines: Sequence[str], header: str = "message") -> Table:
    """Return a table of one column, with at most 50 lines."""
    return Table(title, (header,), [(line,) for line in lines[:50]])


def page_of(title: str, sections: Sequence[PageSection]) -> bytes:
    """Return the content of a page that is written now."""
    written = f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by sdp {sdp.__version__}"
    values = {"title": title, "sections": sections, "written": written, "data_uri": _data_uri, "plain": _plain}
    return render(Path(__file__).with_suffix(".html"), values).encode()


def text_of(section: PageSection) -> str:
    """Return a section as text: its figures, tables and bars."""
    figures = console.table((name, value) for name, value in section.figures if value)
    texts = [f"{section.title}: {section.uri}\n{section.verdict}", figures, *_texts(section.shown)]
    return "\n\n".join(filter(None, texts))


def _texts(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Table():
                rows = [[_plain(cell) for cell in row] for row in block.rows]
                yield f"{block.title}\n{console.table(rows, block.header)}"
            case Bar():
                shares = [(name, f"{size / block.whole:.1%}", words) for name, size, words in block.parts]
                yield f"{block.title}\n{console.table(shares)}"


def _plain(cell: Cell) -> str:
    match cell:
        case Share():
            return f"{cell.of_whole:.2%}"
        case int() | float():
            return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"
    return cell


def _data_uri(picture: bytes) -> str:
    kind = "jpeg" if picture[:3] == b"\xff\xd8\xff" else "webp" if picture[8:12] == b"WEBP" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
