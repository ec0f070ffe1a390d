"""Draw one panel with Pillow: a number, lines, areas, bars or a table. Independent of Grafana and Prometheus."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from PIL import Image, ImageDraw, ImageFont

from scripts.dashboards.figures import figure, scale_of, ticks

Point = tuple[float, float]
PALETTE = (
    "#5b8ff9", "#f6903d", "#5ad8a6", "#e86452", "#9270ca", "#f6bd16", "#6dc8ec", "#ff99c3", "#269a99", "#8d6e63",
)  # fmt: skip
INK, FAINT, GRID, PAPER, FRAME = "#1f2933", "#66727f", "#e4e7eb", "#ffffff", "#cbd2d9"
COLORS = {"green": "#2f9e44", "yellow": "#c98a00", "red": "#d6336c", "text": INK}
_TITLE, _TEXT, _SMALL = 15, 12, 11
_LACKING = str.maketrans({"×": "x", "–": "-", "…": "..."})
"""Characters that Pillow's own font lacks, and their replacements."""
_NAMES_LINE, _MOST_NAMES = 16, 8


@dataclass(frozen=True, slots=True)
class Curve:
    """A named series of points."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of the picture that a panel draws in, and the panel's unit."""

    draw: ImageDraw.ImageDraw
    box: tuple[int, int, int, int]
    unit: str

    def text(self, at: tuple[float, float], text: str, size: int, color: str = INK, anchor: str = "lt") -> None:
        self.draw.text(at, text.translate(_LACKING), fill=color, font=font(size), anchor=anchor)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def paper(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), "#f5f7fa")


def titled(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], title: str, unit: str) -> Frame:
    """Draw a panel's frame and title; return the area inside."""
    left, top, right, bottom = box
    draw.rectangle(box, fill=PAPER, outline=FRAME)
    frame = Frame(draw, (left + 10, top + 38, right - 10, bottom - 8), unit)
    frame.text((left + 10, top + 8), fitting(draw, title, right - left - 20, _TITLE), _TITLE)
    return frame


def number(frame: Frame, values: Sequence[tuple[str, float]], steps: Sequence[tuple[float | None, str]]) -> None:
    """Draw one or several figures, with their names if they have any."""
    left, top, right, bottom = frame.box
    if not values:
        frame.text(((left + right) / 2, (top + bottom) / 2), "–", 30, FAINT, "mm")
        return
    height = (bottom - top) / len(values)
    for row, (name, value) in enumerate(values):
        middle = top + height * (row + 0.5)
        color = COLORS.get(_color(value, steps), INK)
        size = 32 if len(values) == 1 else 22
        if name:
            frame.text((left, middle), fitting(frame.draw, name, (right - left) * 0.45, _TEXT), _TEXT, FAINT, "lm")
            frame.text((right, middle), figure(value, frame.unit), size if len(values) > 1 else 28, color, "rm")
        else:
            frame.text(((left + right) / 2, middle), figure(value, frame.unit), size, color, "mm")


def curves(frame: Frame, shown: Sequence[Curve], span: tuple[float, float], *, stack: bool, most: float | None) -> None:
    """Draw lines over time, or stacked areas."""
    left, top, right, bottom = frame.box
    if not shown:
        frame.text(((left + right) / 2, (top + bottom) / 2), "no data in this period", _TEXT, FAINT, "mm")
        return
    bottom -= _names(frame, [curve.name for curve in shown])
    levels = _stacked(shown) if stack else [list(curve.points) for curve in shown]
    highest = max(value for points in levels for _, value in points)
    lowest = min(0.0, *(value for points in levels for _, value in points))
    high = most if most is not None else (highest or 1.0)
    scale = scale_of(frame.unit, high)
    marks = [mark * scale for mark in ticks(lowest / scale, high / scale)]
    label = max(frame.draw.textlength(figure(mark, frame.unit), font(_SMALL)) for mark in marks)
    left, bottom = int(left + label + 8), bottom - 18
    start, end = span

    def x(at: float) -> float:
        return left + (at - start) / (end - start) * (right - left)

    def y(value: float) -> float:
        return bottom - (min(value, marks[-1]) - marks[0]) / (marks[-1] - marks[0]) * (bottom - top)

    for mark in marks:
        frame.draw.line([(left, y(mark)), (right, y(mark))], fill=GRID)
        frame.text((left - 6, y(mark)), figure(mark, frame.unit), _SMALL, FAINT, "rm")
    _clock(frame, start, end, x, bottom)
    below: list[Point] = []
    for number_, points in enumerate(levels):
        color = PALETTE[number_ % len(PALETTE)]
        line = [(x(at), y(value)) for at, value in points]
        if stack:
            under = [(x(at), y(value)) for at, value in reversed(below)] or [(line[-1][0], y(0)), (line[0][0], y(0))]
            frame.draw.polygon([*line, *under], fill=_pale(color))
            below = points
        if len(line) > 1:
            frame.draw.line(line, fill=color, width=2, joint="curve")
        else:
            frame.draw.ellipse([line[0][0] - 2, line[0][1] - 2, line[0][0] + 2, line[0][1] + 2], fill=color)


def bars(frame: Frame, values: Sequence[tuple[str, float]], most: float | None) -> None:
    """Draw horizontal bars, the longest first."""
    left, top, right, bottom = frame.box
    shown = sorted(values, key=lambda one: -one[1])[: max(1, (bottom - top) // 24)]
    full = most or max((value for _, value in shown), default=1.0) or 1.0
    middle = left + (right - left) * 0.5
    for row, (name, value) in enumerate(shown):
        y = top + row * 24
        frame.text((left, y + 10), fitting(frame.draw, name, middle - left - 8, _TEXT), _TEXT, INK, "lm")
        frame.draw.rectangle([middle, y + 2, middle + (right - middle - 80) * value / full, y + 18], fill=PALETTE[0])
        frame.text((right, y + 10), figure(value, frame.unit), _TEXT, INK, "rm")


def table(frame: Frame, rows: Sequence[tuple[dict[str, str], float]]) -> None:
    """Draw a column for each label, and one for the value."""
    left, top, right, bottom = frame.box
    names = sorted({name for labels, _ in rows for name in labels})
    heads = [*names, "value"]
    width = (right - left) / len(heads)
    lines = [heads, *([*(labels.get(name, "") for name in names), figure(value, frame.unit)] for labels, value in rows)]
    for row, cells in enumerate(lines[: max(1, (bottom - top) // 20)]):
        for column, cell in enumerate(cells):
            at = (left + column * width, top + row * 20)
            frame.text(at, fitting(frame.draw, cell, width - 6, _TEXT), _TEXT, INK if row else FAINT)


def fitting(draw: ImageDraw.ImageDraw, text: str, width: float, size: int) -> str:
    """Return the text, cut with three dots if it is too wide."""
    if draw.textlength(text, font(size)) <= width:
        return text
    while text and draw.textlength(f"{text}...", font(size)) > width:
        text = text[:-1]
    return f"{text}..."


def _names(frame: Frame, names: Sequence[str]) -> int:
    """Draw the legend at the bottom; return its height."""
    left, _, right, bottom = frame.box
    shown = [name for name in names if name][:_MOST_NAMES]
    if not shown:
        return 0
    more = f"and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    places: list[tuple[float, int, str]] = []
    x, row = float(left), 0
    for name in [*shown, *([more] if more else [])]:
        cut = fitting(frame.draw, name, (right - left) - 20, _SMALL)
        width = 26 + frame.draw.textlength(cut, font(_SMALL))
        if x > left and x + width > right:
            x, row = float(left), row + 1
        places.append((x, row, cut))
        x += width
    height = (row + 1) * _NAMES_LINE
    for number_, (x, row, name) in enumerate(places):
        y = bottom - height + row * _NAMES_LINE + _NAMES_LINE / 2
        if name != more:
            frame.draw.line([(x, y), (x + 10, y)], fill=PALETTE[number_ % len(PALETTE)], width=3)
        frame.text((x + 14, y), name, _SMALL, FAINT, "lm")
    return height


def _stacked(shown: Sequence[Curve]) -> list[list[Point]]:
    """Return each curve added to those before it, at every time that any curve has."""
    times = sorted({at for curve in shown for at, _ in curve.points})
    known = [dict(curve.points) for curve in shown]
    total = dict.fromkeys(times, 0.0)
    levels: list[list[Point]] = []
    for values in known:
        total = {at: total[at] + values.get(at, 0.0) for at in times}
        levels.append(list(total.items()))
    return levels


def _clock(frame: Frame, start: float, end: float, x: Callable[[float], float], bottom: int) -> None:
    step = next((s for s in (10, 30, 60, 120, 300, 600, 1800, 3600) if (end - start) / s <= 6), 3600)
    at = (int(start) // step + 1) * step
    while at < end:
        label = datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S" if step < 60 else "%H:%M")
        frame.text((x(at), bottom + 4), label, _SMALL, FAINT, "mt")
        at += step


def _color(value: float, steps: Sequence[tuple[float | None, str]]) -> str:
    reached = [color for least, color in steps if least is None or value >= least]
    return reached[-1] if reached else "text"


def _pale(color: str) -> str:
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{(part + 2 * 255) // 3:02x}" for part in parts)
