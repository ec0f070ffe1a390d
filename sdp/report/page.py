"""A report as one HTML page that needs nothing beside it: no script, no style sheet, no font, no network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1, with a bar as long as it is large beside the largest of its column."""

    of_whole: float
    largest: float = 1.0


Cell = str | int | float | Share


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
    half: bool = False
    """Drawn for half the page's width: two of them stand side by side."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar cut into named shares: name, size, what to say of it."""

    title: str
    parts: Sequence[tuple[str, float, str]]
    colours: str = "abcdef"
    half: bool = False


@dataclass(frozen=True, slots=True)
class Strips:
    """Pictures in rows that have a name each."""

    title: str
    rows: Sequence[tuple[str, Sequence[Tile]]]


@dataclass(frozen=True, slots=True)
class Folded:
    """Text that is shown when it is asked for."""

    title: str
    text: str


_CAPTION = 400
"""Characters of a caption that are shown."""

Block = Table | Gallery | Strips | Drawing | Bar | Folded


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
    glance: str = ""
    """What stands at the top of the page: how much, how fast."""


def render(title: str, sections: Sequence[Section], written: str) -> str:
    """The page; `written` says when and by what."""
    links = "".join(_link(number, section) for number, section in enumerate(sections))
    body = "\n".join(_section(number, section) for number, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # or the browser asks for one
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><header><h1>{escape(title)}</h1>"
        f"<nav>{links}</nav></header>\n<main>\n{body}\n</main><footer>{escape(written)}</footer></body></html>\n"
    )


def _link(number: int, section: Section) -> str:
    state = "good" if section.good else "bad"
    return (
        f'<a href="#s{number}"><b class="{state}">{escape(section.title)}</b>'
        f"<span>{escape(section.glance or section.verdict)}</span></a>"
    )


def _section(number: int, section: Section) -> str:
    figures = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in section.figures)
    blocks = "\n".join(map(_block, section.blocks))
    state = "good" if section.good else "bad"
    return (
        f'<section id="s{number}"><h2>{escape(section.title)}</h2><p class="uri">{escape(section.uri)}</p>'
        f'<p class="verdict {state}">{escape(section.verdict)}</p><dl>{figures}</dl>\n'
        f'<div class="blocks">{blocks}</div></section>'
    )


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Gallery):
        tiles = "".join(map(_tile, block.tiles))
        kind = "gallery wide" if block.wide else "gallery"
        return f'<div><h3>{escape(block.title)}</h3><div class="{kind}">{tiles}</div></div>'
    if isinstance(block, Strips):
        return f"<div><h3>{escape(block.title)}</h3>{''.join(_strip(name, tiles) for name, tiles in block.rows)}</div>"
    if isinstance(block, Bar):
        return _figure(block, _bar(block))
    if isinstance(block, Drawing):
        return _figure(block, f'<div class="scroll">{block.svg}</div>')
    return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"


def _figure(block: Bar | Drawing, drawn: str) -> str:
    kind = ' class="half"' if block.half else ""
    return f"<figure{kind}><figcaption>{escape(block.title)}</figcaption>{drawn}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<div><h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></div>"
    )


def _bar(bar: Bar) -> str:
    whole = sum(size for _, size, _ in bar.parts) or 1.0
    cuts, legend = "", ""
    for number, (name, size, text) in enumerate(bar.parts):
        colour, share = f"background:var(--{bar.colours[number % len(bar.colours)]})", size / whole
        told = f"{escape(name)} {share:.1%} ({escape(text)})"
        if size > 0:
            cuts += f'<i style="flex:{share:.5f};{colour}" title="{told}"></i>'
        legend += f'<li><i style="{colour}"></i>{told}</li>'
    return f'<div class="bar">{cuts}</div><ul class="legend">{legend}</ul>'


def _strip(name: str, tiles: Sequence[Tile]) -> str:
    pictures = "".join(f'<div class="tile">{_picture(tile)}{_note(tile)}</div>' for tile in tiles)
    return f'<div class="strip"><p>{escape(_cut(name))}</p><div>{pictures}</div></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, Share):
        width = f"{100 * cell.of_whole / (cell.largest or 1.0):.2f}%"
        return f'<td class="n">{cell.of_whole:.2%}<i class="meter"><i style="width:{width}"></i></i></td>'
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f'<td class="n">{cell:,.4g}</td>'


def _tile(tile: Tile) -> str:
    return f'<div class="tile">{_picture(tile)}<p>{escape(_cut(tile.caption))}</p>{_note(tile)}</div>'


def _cut(text: str) -> str:
    return text if len(text) <= _CAPTION else f"{text[: _CAPTION - 1]}…"


def _picture(tile: Tile) -> str:
    if tile.data is None:
        return '<span class="none"></span>'
    data = base64.b64encode(tile.data).decode()
    said = escape(_cut(tile.caption))
    return f'<img alt="{said}" title="{said}" src="data:{_type(tile.data)};base64,{data}">'


def _note(tile: Tile) -> str:
    return f"<small>{escape(tile.note)}</small>" if tile.note else ""


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
.blocks { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 28px }
.blocks > * { grid-column: 1 / -1; min-width: 0 } .blocks > .half { grid-column: auto }
@media (max-width: 760px) { .blocks > .half { grid-column: 1 / -1 } section { padding: 16px }
  header, main, footer { padding: 0 12px } dl { gap: 10px 22px } dl div { min-width: 70px } }
nav { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 10px; margin: 16px 0 }
nav a { color: var(--ink); text-decoration: none; background: var(--paper); border: 1px solid var(--line);
  border-radius: 10px; padding: 10px 14px; line-height: 1.35 } nav a:hover { border-color: var(--a) }
nav b { display: block } nav span { color: var(--soft); font-size: 12px }
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
.tile small { color: var(--soft); display: block; line-height: 1.35; overflow-wrap: anywhere }
.meter { display: block; height: 4px; min-width: 90px; border-radius: 2px; background: var(--ground); margin-top: 3px }
.meter i { display: block; height: 4px; min-width: 1px; border-radius: 2px; background: var(--f) }
.bar { display: flex; gap: 1px; height: 24px; border-radius: 6px; overflow: hidden; background: var(--ground) }
.bar i { min-width: 2px } .legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 22px; padding: 0;
  margin: 8px 0 0; font-size: 12px; color: var(--soft) }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px }
.strip { border-top: 1px solid var(--line); padding: 8px 0; display: grid; gap: 4px 18px;
  grid-template-columns: minmax(120px, 200px) 1fr } .strip > p { margin: 0; font-size: 13px; overflow-wrap: anywhere }
.strip > div { display: flex; flex-wrap: wrap; gap: 10px } .strip .tile { width: 112px }
@media (max-width: 760px) { .strip { grid-template-columns: 1fr } .strip .tile { width: 84px } }
figure { margin: 22px 0; min-width: 0 } figcaption { font-size: 14px; font-weight: 600; margin-bottom: 6px }
svg { width: 100%; min-width: 620px; height: auto; display: block } .half svg { min-width: 330px }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
details { margin-top: 18px } summary { cursor: pointer; color: var(--soft) }
pre { overflow-x: auto; font-size: 12px; background: var(--ground); padding: 12px; border-radius: 6px }
footer { color: var(--soft); font-size: 12px; padding-bottom: 40px }
"""
