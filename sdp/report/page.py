"""The blocks of a report, rendered by page.html as one file without scripts, style sheets or network access."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import sdp
from sdp.charts import render as render_template
from sdp.storage.named import written_for


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

    data: bytes | None
    """The encoded picture; None if it is missing."""
    caption: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side."""

    title: str
    tiles: Sequence[Tile]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Svg:
    """A chart or a profile's timeline as SVG."""

    title: str
    svg: str
    half: bool = False
    """True for half the page's width, so that two fit side by side."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar divided into parts: name, size, explanation."""

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


Block = Table | Gallery | Strips | Svg | Bar | Folded


def listing(title: str, lines: Sequence[str], header: str = "message") -> list[Block]:
    """Return a table of one column with at most 50 lines, or nothing if there are no lines."""
    return [Table(title, (header,), [(line,) for line in lines[:50]])] if lines else []


@dataclass(frozen=True, slots=True)
class PageSection:
    """The report of one dataset, run or evaluation."""

    title: str
    uri: str
    verdict: str
    """The outcome in one sentence."""
    good: bool = True
    figures: Sequence[tuple[str, str]] = ()
    """The most important numbers: name and value."""
    blocks: Sequence[Block] = ()
    glance: str = ""
    """The line at the top of the page: amount and speed."""


def write_page(title: str, sections: Sequence[PageSection], file: Path, option: str = "report: --out") -> None:
    """Write sections as one page, atomically. Errors name the option that the file comes from."""
    page = page_of(title, sections)
    with written_for(option, file) as sink:
        sink.write(page)


def page_of(title: str, sections: Sequence[PageSection]) -> bytes:
    """Return the content of a page that is written now."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return render(title, sections, f"written {now} by sdp {sdp.__version__}").encode()


def render(title: str, sections: Sequence[PageSection], written: str) -> str:
    """Return the page; `written` is its last line."""
    values = {"title": title, "sections": sections, "written": written, "data_uri": _data_uri}
    return render_template(Path(__file__).with_suffix(".html"), values)


def _data_uri(picture: bytes) -> str:
    kind = "jpeg" if picture[:3] == b"\xff\xd8\xff" else "webp" if picture[8:12] == b"WEBP" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
