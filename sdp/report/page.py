"""Descriptions in sections of blocks, printed as text, as JSON or as one HTML page (page.html).

The page has no scripts, and needs no style sheets and no network access.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sdp
from sdp import console
from sdp.charts import render

Cell = str | int | float

_DIGEST = re.compile(r"([0-9a-f]{40,})", re.ASCII)


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
    link: str = ""
    """The picture's address, in place of `data`."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Rows of pictures, each with its name; a row without a name fills the page, with a caption to each picture."""

    title: str
    rows: Sequence[tuple[str, Sequence[Tile]]]


@dataclass(frozen=True, slots=True)
class Svg:
    """A chart."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar divided into parts: name, size, the size in words."""

    title: str
    rows: Sequence[tuple[str, float, str]]
    colours: str = "abcdef"

    @property
    def shares(self) -> list[tuple[str, float, str]]:
        """Name, share of the whole and words of each part."""
        whole = sum(size for _, size, _ in self.rows) or 1.0
        return [(name, size / whole, f"{size / whole:.1%} ({words})") for name, size, words in self.rows]


@dataclass(frozen=True, slots=True)
class Folded:
    """Text that the reader can unfold."""

    title: str
    text: str


Block = Table | Gallery | Svg | Bar | Folded


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
    details: Sequence[Block] = ()
    """Blocks that the page folds: columns, sources, settings."""
    problems: Sequence[str] = ()
    """One line for each thing that is damaged or missing."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The description for programs."""

    @property
    def shown(self) -> list[Block]:
        """The problems, and the blocks that have rows."""
        return _with_rows([listing("Problems", self.problems), *self.blocks])

    @property
    def folded(self) -> list[Block]:
        """The details that have rows."""
        return _with_rows(self.details)

    def to_json(self) -> dict[str, Any]:
        return {"uri": self.uri, **self.facts, "verdict": self.verdict, "problems": list(self.problems)}


def _with_rows(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if getattr(block, "rows", True)]


def listing(title: str, lines: Sequence[str], header: str = "message") -> Table:
    """Return a table of one column, with at most 50 lines."""
    return Table(title, (header,), [(line,) for line in lines[:50]])


def page_of(title: str, sections: Sequence[PageSection]) -> bytes:
    """Return the content of a page that is written now."""
    written = f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by sdp {sdp.__version__}"
    values = {"title": title, "sections": sections, "written": written, "data_uri": _data_uri}
    values |= {"plain": _plain, "digest": _DIGEST}
    return render(Path(__file__).with_suffix(".html"), values).encode(errors="replace")


def text_of(section: PageSection) -> str:
    """Return a section as text: its figures, tables and bars."""
    texts = [f"{section.title}: {section.uri}\n{section.verdict}"]
    texts += [console.table((name, value) for name, value in section.figures if value)]
    for block in (*section.shown, *section.folded):
        if isinstance(block, Table):
            rows = [[_plain(cell) for cell in row] for row in block.rows]
            texts.append(f"{block.title}\n{console.table(rows, block.header)}")
        elif isinstance(block, Bar):
            texts.append(f"{block.title}\n{console.table((name, share) for name, _, share in block.shares)}")
    return "\n\n".join(filter(None, texts))


def _plain(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"


def _data_uri(picture: bytes) -> str:
    kind = "webp" if picture[8:12] == b"WEBP" else "png"
    if picture[:3] == b"\xff\xd8\xff":
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
