"""A profile as a picture: one step's activities on the host and the GPU, its memory, and what took longest."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sdp.console import size

PICTURE, SUMMARY = "profile/timeline.svg", "profile/summary.json"

_WIDTH, _LEFT, _RIGHT = 1000, 64, 12
_BAR, _GAP = 22, 8
_CURVE = 150
_COLOURS = {"data": "b", "copy": "e", "forward": "a", "backward": "c", "optimizer": "d", "checkpoint": "f"}
_SPARE = "e"
_STYLE = """svg{--ink:#1d2330;--soft:#667085;--line:#d9dee7;--a:#2563eb;--b:#d97706;--c:#059669;--d:#9333ea;--e:#64748b;
--f:#dc2626;background:#fff} text{fill:var(--soft);font:11px system-ui,sans-serif}"""


def picture(summary: Mapping[str, Any]) -> str:
    """An SVG file that needs nothing beside it."""
    height, inner = _drawn(summary)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {_WIDTH + 16} {height + 16}" width="{_WIDTH}">'
        f"<style>{_STYLE}</style>{inner}</svg>\n"
    )


def drawing(summary: Mapping[str, Any]) -> str:
    """The same for a page that has the colours."""
    height, inner = _drawn(summary)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{inner}</svg>'


def _drawn(summary: Mapping[str, Any]) -> tuple[int, str]:
    timeline = summary.get("timeline")
    if not timeline:
        return 40, '<text x="0" y="24">no whole step was profiled</text>'
    whole, y, out = float(timeline["ms"]) or 1.0, 18, []
    busy = f", GPU busy {summary['gpu_busy']:.1%}" if summary.get("gpu_busy") is not None else ""
    out.append(
        f'<text x="0" y="10" style="fill:var(--ink);font-weight:600">One of {summary["steps"]} steps: {whole:,.1f} ms '
        f"on {escape(str(summary['device']))}{busy}</text>"
    )
    for row in ("host", "gpu"):
        if timeline[row]:
            out.append(_activities(row, timeline[row], whole, y))
            y += _BAR + _GAP
    if timeline["gpu_busy"]:
        out.append(_density(timeline["gpu_busy"], y))
        y += _BAR + _GAP
    out.append(_axis(whole, y))
    y += 26
    if len(timeline["memory"]) > 1:
        out.append(_memory(timeline["memory"], whole, str(summary["memory"]["of"]), y))
        y += _CURVE + 2 * _GAP
    out.append(_legend(summary["phases"], y + 12))
    y += 20 + 16 * len(summary["phases"])
    out.append(_longest(summary["ops"][:10], str(summary["clock"]), y + 12))
    return y + 20 + 16 * min(10, len(summary["ops"])), "".join(out)


def _x(ms: float, whole: float) -> float:
    return _LEFT + ms / whole * (_WIDTH - _LEFT - _RIGHT)


def _colour(name: str) -> str:
    return f"var(--{_COLOURS.get(name, _SPARE)})"


def _activities(row: str, spans: Sequence[Sequence[Any]], whole: float, y: int) -> str:
    out = [f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{"GPU" if row == "gpu" else row}</text>']
    for name, start, end in spans:
        left, right = _x(float(start), whole), _x(float(end), whole)
        title = f"{escape(str(name))}: {float(end) - float(start):,.2f} ms"
        out.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 0.5):.1f}" height="{_BAR}" '
            f'fill="{_colour(str(name))}"><title>{title}</title></rect>'
        )
        if right - left > 8 * len(str(name)):
            out.append(f'<text x="{left + 6:.1f}" y="{y + 15}" style="fill:#fff">{escape(str(name))}</text>')
    return "".join(out)


def _density(busy: Sequence[float], y: int) -> str:
    width = (_WIDTH - _LEFT - _RIGHT) / len(busy)
    bars = "".join(
        f'<rect x="{_LEFT + n * width:.1f}" y="{y + _BAR * (1 - share):.1f}" width="{width:.2f}" '
        f'height="{_BAR * share:.1f}" fill="var(--e)"/>'
        for n, share in enumerate(busy)
        if share > 0
    )
    return f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">busy</text>{bars}'


def _axis(whole: float, y: int) -> str:
    from sdp.report.charts import short, ticks

    out = [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="var(--line)"/>']
    out += [
        f'<text x="{_x(ms, whole):.1f}" y="{y + 14}" text-anchor="middle">{short(ms)} ms</text>'
        for ms in ticks(0.0, whole, 8)
    ]
    return "".join(out)


def _memory(curve: Sequence[Sequence[float]], whole: float, of: str, y: int) -> str:
    """Allocated memory over the step, from nought."""
    top = max(total for _, total in curve) or 1.0
    bottom = y + _CURVE

    def at(ms: float, total: float) -> str:
        return f"{_x(ms, whole):.1f},{bottom - max(total, 0.0) / top * (_CURVE - 12):.1f}"

    points, before = [], curve[0][1]
    for ms, total in curve:  # steps, as memory is taken and given back
        points += [at(ms, before), at(ms, total)]
        before = total
    points.append(at(whole, before))
    area = f"{_x(curve[0][0], whole):.1f},{bottom} {' '.join(points)} {_x(whole, whole):.1f},{bottom}"
    name = "GPU memory" if of == "gpu" else "memory"
    return (
        f'<polygon points="{area}" fill="var(--a)" opacity="0.18"/>'
        f'<polyline points="{" ".join(points)}" fill="none" stroke="var(--a)" stroke-width="1.5"/>'
        f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{size(top)}</text>'
        f'<text x="{_LEFT - 8}" y="{bottom}" text-anchor="end">0</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{y + 4}" text-anchor="end">{name} allocated</text>'
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="var(--line)"/>'
    )


def _legend(phases: Sequence[Mapping[str, Any]], y: int) -> str:
    out = []
    for number, phase in enumerate(phases):
        line = y + 16 * number
        peak = f", memory to {size(phase['memory_peak'])}" if phase["memory_peak"] is not None else ""
        name = escape(str(phase["name"]))
        out.append(
            f'<rect x="{_LEFT}" y="{line - 9}" width="9" height="9" fill="{_colour(str(phase["name"]))}"/>'
            f'<text x="{_LEFT + 15}" y="{line}" style="fill:var(--ink)">{name}: {phase["ms"]:,.2f} ms, '
            f"{phase['share']:.1%}{peak}</text>"
        )
    return "".join(out)


def _longest(ops: Sequence[Mapping[str, Any]], clock: str, y: int) -> str:
    most = max((float(op["ms"]) for op in ops), default=1.0) or 1.0
    out = [f'<text x="{_LEFT}" y="{y}" style="fill:var(--ink);font-weight:600">Longest on the {clock}</text>']
    for number, op in enumerate(ops, 1):
        line = y + 16 * number
        width = float(op["ms"]) / most * 380
        out.append(
            f'<rect x="{_LEFT}" y="{line - 9}" width="{width:.1f}" height="10" fill="var(--e)" opacity="0.5"/>'
            f'<text x="{_LEFT + 390}" y="{line}">{escape(str(op["name"])[:60])}: {op["ms"]:,.2f} ms a step, '
            f"{op['share']:.1%}, {op['calls']:g} calls</text>"
        )
    return "".join(out)
