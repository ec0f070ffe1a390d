"""A report as one HTML page that needs nothing beside it: no script, no style sheet, no font, no network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; numbers stand at the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A picture with its text."""

    data: bytes | None
    """Encoded; None where there is none to show."""
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
    """A picture that `charts` drew."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Folded:
    """Text that is shown when it is asked for."""

    title: str
    text: str


Block = Table | Gallery | Drawing | Folded


@dataclass(frozen=True, slots=True)
class Section:
    """What there is to say of one dataset or run."""

    title: str
    uri: str
    verdict: str
    """One sentence: what it came to."""
    good: bool = True
    figures: Sequence[tuple[str, str]] = ()
    """The few numbers that matter: what it is called, and how much."""
    blocks: Sequence[Block] = field(default_factory=list)


def render(title: str, sections: Sequence[Section], written: str) -> str:
    """The page; `written` says when and by what."""
    links = "".join(f'<a href="#s{n}">{escape(s.title)}</a>' for n, s in enumerate(sections))
    body = "\n".join(_section(number, section) for number, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # or the browser asks for one
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><header><h1>{escape(title)}</h1>"
        f"<nav>{links}</nav></header>\n<main>\n{body}\n</main><footer>{escape(written)}</footer></body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    figures = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in section.figures)
    blocks = "\n".join(map(_block, section.blocks))
    state = "good" if section.good else "bad"
    return (
        f'<section id="s{number}"><h2>{escape(section.title)}</h2><p class="uri">{escape(section.uri)}</p>'
        f'<p class="verdict {state}">{escape(section.verdict)}</p><dl>{figures}</dl>\n{blocks}</section>'
    )


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Gallery):
        tiles = "".join(map(_tile, block.tiles))
        return f'<h3>{escape(block.title)}</h3><div class="{"gallery wide" if block.wide else "gallery"}">{tiles}</div>'
    if isinstance(block, Drawing):
        return f"<figure><figcaption>{escape(block.title)}</figcaption>{block.svg}</figure>"
    return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f'<td class="n">{cell:,.4g}</td>'


def _tile(tile: Tile) -> str:
    if tile.data is None:
        picture = '<span class="none"></span>'
    else:
        data = base64.b64encode(tile.data).decode()
        picture = f'<img alt="{escape(tile.caption)}" src="data:{_type(tile.data)};base64,{data}">'
    note = f"<small>{escape(tile.note)}</small>" if tile.note else ""
    return f'<div class="tile">{picture}<p>{escape(tile.caption)}</p>{note}</div>'


def _type(data: bytes) -> str:
    if data[:3] == b"\xff\xd8\xff":
        return "image/jpeg"
    return "image/webp" if data[8:12] == b"WEBP" else "image/png"


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #d9dee7; --paper: #fff; --ground: #f5f6f9;
  --good: #17803d; --bad: #b42318; --a: #2563eb; --b: #d97706; --c: #059669; --d: #9333ea; --e: #64748b; --f: #dc2626 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #98a2b3; --line: #343b4a; --paper: #171b24;
  --ground: #0f1218; --good: #4ade80; --bad: #f97066; --a: #60a5fa; --b: #fbbf24; --c: #34d399; --d: #c084fc;
  --e: #94a3b8; --f: #f87171 } }
* { box-sizing: border-box }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground) }
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px }
h1 { font-size: 24px; margin: 28px 0 4px } h2 { font-size: 19px; margin: 0 }
h3 { font-size: 14px; margin: 24px 0 8px }
nav a { margin-right: 16px; color: var(--a); text-decoration: none }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 20px 24px;
  margin: 20px 0 }
.uri { margin: 0; color: var(--soft); font: 12px ui-monospace, monospace; overflow-wrap: anywhere }
.verdict { margin: 10px 0; font-weight: 600 } .good { color: var(--good) } .bad { color: var(--bad) }
dl { display: flex; flex-wrap: wrap; gap: 12px 36px; margin: 14px 0 } dl div { min-width: 90px }
dt { color: var(--soft); font-size: 12px } dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 500 } td.n { text-align: right; font-variant-numeric: tabular-nums }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); gap: 14px }
.gallery.wide { grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)) }
.tile img, .tile .none { width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--ground);
  border-radius: 6px; display: block; image-rendering: auto }
.tile p { margin: 4px 0 0; font-size: 12px; line-height: 1.35; overflow-wrap: anywhere }
.tile small { color: var(--soft) }
figure { margin: 22px 0 } figcaption { font-size: 14px; font-weight: 600; margin-bottom: 6px }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
details { margin-top: 18px } summary { cursor: pointer; color: var(--soft) }
pre { overflow-x: auto; font-size: 12px; background: var(--ground); padding: 12px; border-radius: 6px }
footer { color: var(--soft); font-size: 12px; padding-bottom: 40px }
"""
