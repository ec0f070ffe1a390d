"""Charts as SVG, in the colours that the page defines (--a, --b, …)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 1000, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_COLOURS = "abcdef"
_MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; a gap where a value is missing."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False


def lines(curves: Sequence[Line], *, x_name: str, zero: bool = False, log: bool = False) -> str:
    """Curves over a common axis. `zero` begins at nought, `log` takes the logarithm upwards."""
    points = [(a, b) for c in curves for a, b in zip(c.x, c.y, strict=True) if b is not None and math.isfinite(b)]
    if log:
        points = [(a, b) for a, b in points if b > 0]
    if not points:
        return _svg(40, '<text x="0" y="24">nothing to draw yet</text>')
    low_x, high_x = _span([a for a, _ in points])
    heights = [math.log10(b) if log else b for _, b in points]
    low_y, high_y = _span([*heights, 0.0] if zero else heights)

    def at(a: float, b: float) -> tuple[float, float]:
        height = math.log10(b) if log else b
        return (
            _LEFT + (a - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (height - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM),
        )

    drawn = [_grid(ticks(low_x, high_x), [(10**t if log else t) for t in ticks(low_y, high_y)], at, x_name)]
    for number, curve in enumerate(curves):
        colour = f"var(--{_COLOURS[number % len(_COLOURS)]})"
        look = f'fill="none" stroke="{colour}" stroke-width="{1 if curve.faint else 2}"'
        look += ' opacity="0.35"' if curve.faint else ""
        for piece in _pieces(curve, log):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(a, b) for a, b in piece))
            drawn.append(f'<polyline points="{path}" {look}/>')
    named = [(c.name, n) for n, c in enumerate(curves) if c.name]
    drawn += [
        f'<text x="{_WIDTH - _RIGHT - 150 * (len(named) - place)}" y="{_TOP + 2}" style="fill:var(--{_COLOURS[n]})">'
        f"{escape(name)}</text>"
        for place, (name, n) in enumerate(named)
        if len(named) > 1
    ]
    return _svg(_HEIGHT, "".join(drawn))


def shares(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar cut into named shares: name, size, what to say of it."""
    whole = sum(size for _, size, _ in parts) or 1.0
    left, drawn = 0.0, []
    for number, (name, size, text) in enumerate(parts):
        width = size / whole * _WIDTH
        colour = f"var(--{_COLOURS[number % len(_COLOURS)]})"
        drawn.append(
            f'<rect x="{left:.1f}" y="0" width="{max(width - 1, 0.5):.1f}" height="26" fill="{colour}">'
            f"<title>{escape(name)}: {escape(text)}</title></rect>"
        )
        left += width
    for number, (name, size, text) in enumerate(parts):
        x, y = 4 + number % 4 * 250, 46 + number // 4 * 18
        drawn.append(
            f'<rect x="{x}" y="{y - 9}" width="9" height="9" fill="var(--{_COLOURS[number % len(_COLOURS)]})"/>'
            f'<text x="{x + 15}" y="{y}">{escape(name)} {size / whole:.1%} ({escape(text)})</text>'
        )
    return _svg(56 + (len(parts) - 1) // 4 * 18, "".join(drawn))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within a span."""
    raw = (high - low) / about
    step = 10 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(
    xs: Sequence[float], ys: Sequence[float], at: Callable[[float, float], tuple[float, float]], x_name: str
) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    out = []
    for y in ys:
        height = at(xs[0] if xs else 0.0, y)[1]
        out.append(f'<line x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}" stroke="var(--line)"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in xs:
        out.append(
            f'<text x="{at(x, ys[0] if ys else 1.0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{short(x)}</text>'
        )
    out.append(f'<text x="{right}" y="{bottom + 28}" text-anchor="end">{escape(x_name)}</text>')
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


def _svg(height: int, inner: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{inner}</svg>'
