"""Charts as SVG, in the colours that the page defines (--a, --b, …)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HALF, _HEIGHT = 1000, 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 26, 38
_COLOURS = "abcdef"
_MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; a gap where a value is missing."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False


def lines(curves: Sequence[Line], *, x_name: str, zero: bool = False, log: bool = False, half: bool = False) -> str:
    """Curves over a common axis. `zero` begins at nought, `log` takes the logarithm upwards, `half` is for a drawing of
    half the page's width."""
    width = _HALF if half else _WIDTH
    points = [(a, b) for c in curves for a, b in zip(c.x, c.y, strict=True) if b is not None and math.isfinite(b)]
    if log:
        points = [(a, b) for a, b in points if b > 0]
    if not points:
        return _svg(width, 40, '<text x="0" y="24">nothing to draw yet</text>')
    low_x, high_x = _span([a for a, _ in points])
    heights = [math.log10(b) if log else b for _, b in points]
    low_y, high_y = _span([*heights, 0.0] if zero else heights)

    def at(a: float, b: float) -> tuple[float, float]:
        height = math.log10(b) if log else b
        return (
            _LEFT + (a - low_x) / (high_x - low_x) * (width - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (height - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM),
        )

    heights = [(10**t if log else t) for t in ticks(low_y, high_y)]
    drawn = [_grid(ticks(low_x, high_x, 4 if half else 8), heights, at, x_name, width)]
    for number, curve in enumerate(curves):
        colour = f"var(--{_COLOURS[number % len(_COLOURS)]})"
        look = f'fill="none" stroke="{colour}" stroke-width="{1 if curve.faint else 2}"'
        look += ' opacity="0.35"' if curve.faint else ""
        for piece in _pieces(curve, log):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(a, b) for a, b in piece))
            drawn.append(f'<polyline points="{path}" {look}/>')
    named = [(c.name, n) for n, c in enumerate(curves) if c.name]
    drawn += [
        f'<text x="{width - _RIGHT - 110 * (len(named) - place)}" y="{_TOP - 12}" style="fill:var(--{_COLOURS[n]})">'
        f"{escape(name)}</text>"
        for place, (name, n) in enumerate(named)
        if len(named) > 1
    ]
    return _svg(width, _HEIGHT, "".join(drawn))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within a span."""
    raw = (high - low) / about
    step = 10 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(
    xs: Sequence[float], ys: Sequence[float], at: Callable[[float, float], tuple[float, float]], x_name: str, width: int
) -> str:
    right, bottom = width - _RIGHT, _HEIGHT - _BOTTOM
    out = []
    for y in ys:
        height = at(xs[0] if xs else 0.0, y)[1]
        out.append(f'<line x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}" stroke="var(--line)"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in xs:
        out.append(
            f'<text x="{at(x, ys[0] if ys else 1.0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{short(x)}</text>'
        )
    out.append(f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{escape(x_name)}</text>')
    return "".join(out)


def short(number: float) -> str:
    """A number for an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{number:.4g}"


def _pieces(curve: Line, log: bool) -> list[list[tuple[float, float]]]:
    """The curve without its gaps, thinned to what can be seen."""
    pieces: list[list[tuple[float, float]]] = [[]]
    stride = max(1, len(curve.x) // _MOST_POINTS)
    for number, (a, b) in enumerate(zip(curve.x, curve.y, strict=True)):
        if b is None or not math.isfinite(b) or (log and b <= 0):
            pieces.append([])
        elif number % stride == 0 or number == len(curve.x) - 1:
            pieces[-1].append((a, b))
    return [piece for piece in pieces if piece]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    return low, high


def _svg(width: int, height: int, inner: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{inner}</svg>'
