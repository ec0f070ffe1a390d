"""A profile as a picture: one step's activities on the host and the GPU, its memory, and the longest operations.

It needs no torch. The profiler's callback writes the picture beside its summary, and `sdp report` shows it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdp.charts import LEFT, RIGHT, WIDTH, axis, render
from sdp.console import size

PICTURE, SUMMARY = "profile/timeline.svg", "profile/summary.json"

_CURVE = 150
_STEPS = {"data": "b", "copy": "e", "forward": "a", "backward": "c", "optimizer": "d", "checkpoint": "f"}


def drawing(summary: Mapping[str, Any], *, alone: bool = False) -> str:
    """Return the picture as SVG, for a page that defines the colours, or as a separate file (`alone`)."""
    timeline = summary.get("timeline") or {}
    scale, ticks = axis([0.0, float(timeline.get("ms") or 0.0) or 1.0], LEFT, WIDTH - RIGHT, 8)
    memory = timeline.get("memory") or []
    values = {
        "alone": alone,
        "summary": summary,
        "timeline": timeline,
        "x": scale,
        "ticks": ticks,
        "size": size,
        "colours": _STEPS,
        "left": LEFT,
        "width": WIDTH,
        "right": WIDTH - RIGHT,
        "curve": _CURVE,
        "top": max((total for _, total in memory), default=0) or 1.0,
        "memory": [(scale(ms), max(total, 0.0)) for ms, total in memory],
    }
    return render(Path(__file__).with_suffix(".svg"), values)
