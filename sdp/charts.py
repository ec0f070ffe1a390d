"""Charts as SVG, and jinja2 templates. The page that shows a chart defines its colours: --a, --b, ..."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp.console import visible

_LEFT, _RIGHT, _WIDTH = 64, 988, 1000
_TOP, _HEIGHT, _BOTTOM = 26, 280, 38
_MOST_POINTS = 600
_MARKS = {ord(mark): f"&#{ord(mark)};" for mark in "&<>[]`*|\\"}
"""Characters by which Markdown and HTML recognise more than text, as references, which they show as text."""

Tick = tuple[float, str]
"""Position and label."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve; points without a finite value are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False


def lines(curves: Sequence[Line], *, x_name: str) -> str:
    """Return a chart of curves."""
    finite = [
        [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if b is not None and math.isfinite(b)]
        for curve in curves
    ]
    points = [point for points in finite for point in points]
    if not points:
        return f'<svg viewBox="0 0 {_WIDTH} 40" role="img"><text x="0" y="24">no data yet</text></svg>'
    x, columns = _axis([a for a, _ in points], _LEFT, _RIGHT, 8)
    y, rows = _axis([b for _, b in points], _HEIGHT - _BOTTOM, _TOP, 5)
    drawn = []
    for number, (curve, points) in enumerate(zip(curves, finite, strict=True)):
        some = points[:: max(1, len(points) // _MOST_POINTS)] + points[-1:]
        drawn.append((curve, "abcdef"[number % 6], " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in some)))
    frame = {"width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM}
    content = {"columns": columns, "rows": rows, "x_name": x_name, "curves": drawn}
    return render(Path(__file__).with_suffix(".svg"), frame | content)


def _axis(values: Sequence[float], start: float, end: float, about: int) -> tuple[Callable[[float], float], list[Tick]]:
    """Return the scale that maps the values' range to start..end, and about this many ticks."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5

    def scale(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    whole = all(float(value).is_integer() for value in values)
    marks = [tick for tick in ticks(low, high, about) if not whole or tick % 1 == 0]
    return scale, [(scale(tick), f"{tick:,.10g}") for tick in marks]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers within a range."""
    raw = (high - low) / about
    step = 10 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def render(file: Path, values: dict[str, Any]) -> str:
    """Fill in a template file, escaping values for Markdown or HTML; a missing one is an error."""
    from jinja2 import Environment, StrictUndefined

    is_page = file.suffix != ".md"
    shown = visible if is_page else markdown
    settings = Environment(
        autoescape=is_page, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str else value,
    )  # fmt: skip
    return settings.from_string(file.read_text(encoding="utf-8")).render(values)


def markdown(text: str) -> str:
    """Return a line of Markdown, also for a table's cell, that shows a text as it is."""
    return visible(" ".join(text.split())).translate(_MARKS)
