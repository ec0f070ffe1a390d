"""Draws each dashboard as a picture, without Grafana, from a Prometheus that has recorded a run on simulated GPUs.

    python -m scripts.draw_dashboards      records the run of tests/monitoring (minutes) and writes docs/pictures

Panels, queries and layout come from charts/sdp-monitoring/dashboards.
"""

import json
import math
import re
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from scripts import tools
from scripts.dashboards import plots

ROOT = Path(__file__).resolve().parent.parent
DASHBOARDS = ROOT / "charts" / "sdp-monitoring" / "dashboards"
PICTURES = ROOT / "docs" / "pictures"

COLUMN, LINE, GAP, HEAD = 62, 34, 4, 64
POINTS = 240
BEFORE_THE_END_S = 8.0
"""The time of single figures: during training."""
HIDDEN = frozenset({"__name__", "uuid", "job", "instance", "endpoint"})


@dataclass(frozen=True, slots=True)
class Moment:
    """The period to show, and the time of single figures."""

    start: float
    end: float
    at: float

    @property
    def step(self) -> float:
        return max(1.0, (self.end - self.start) / POINTS)


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus, queried with every dashboard variable set to All."""

    url: str
    moment: Moment

    def now(self, expr: str) -> list[tuple[dict[str, str], float]]:
        result = self._ask("query", query=_filled(expr), time=self.moment.at)
        series = [(one["metric"], float(one["value"][1])) for one in result]
        return [(labels, value) for labels, value in series if math.isfinite(value)]

    def history(self, expr: str) -> list[tuple[dict[str, str], list[plots.Point]]]:
        moment = self.moment
        result = self._ask("query_range", query=_filled(expr), start=moment.start, end=moment.end, step=moment.step)
        series = [(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in result]
        finite = [(labels, [point for point in points if math.isfinite(point[1])]) for labels, points in series]
        return [(labels, points) for labels, points in finite if points]

    def _ask(self, path: str, **parameters: object) -> list[Any]:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return list(json.load(answer)["data"]["result"])


def draw_all(url: str, moment: Moment, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        draw(json.loads(path.read_text(encoding="utf-8")), Source(url, moment), folder / f"dashboard-{path.stem}.png")
    with Image.open(folder / "dashboard-gram.png") as picture:  # the figures and the first charts, for README.md
        picture.crop((0, 0, picture.width, HEAD + 12 * LINE)).save(folder / "gpu-memory.png", optimize=True)


def draw(dashboard: Mapping[str, Any], source: Source, target: Path) -> None:
    """Draw one dashboard into a picture."""
    panels = list(_placed(dashboard))
    height = HEAD + LINE * max(place["y"] + place["h"] for _, place in panels) + GAP
    picture = plots.paper(24 * COLUMN + 2 * GAP, height)
    canvas = ImageDraw.Draw(picture)
    canvas.text((10, 10), dashboard["title"], fill=plots.INK, font=plots.font(24))
    note = (
        "Drawn by scripts/draw_dashboards.py, not by Grafana, from a recorded test run. Its GPUs are simulated, and so "
        "are their figures, MFU and validation loss."
    )
    canvas.text((10, 42), note, fill=plots.FAINT, font=plots.font(13))
    for panel, place in panels:
        left, top = GAP + place["x"] * COLUMN, HEAD + place["y"] * LINE
        box = (left + GAP, top + GAP, left + place["w"] * COLUMN - GAP, top + place["h"] * LINE - GAP)
        if panel["type"] == "row":
            canvas.text((left + GAP, top + 10), panel["title"], fill=plots.INK, font=plots.font(17))
        else:
            _panel(canvas, box, panel, source)
    picture.quantize(128).save(target, optimize=True)


def _placed(dashboard: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, int]]]:
    for panel in dashboard["panels"]:
        yield panel, panel["gridPos"]
        for inner in panel.get("panels", []):
            yield inner, inner["gridPos"]


def _panel(
    canvas: ImageDraw.ImageDraw, box: tuple[int, int, int, int], panel: Mapping[str, Any], source: Source
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    frame = plots.titled(canvas, box, panel["title"], defaults.get("unit", "short"))
    queries = [(target["expr"], target.get("legendFormat", "")) for target in panel["targets"]]
    if panel["type"] == "timeseries":
        shown = [
            plots.Curve(_name(legend, labels), points)
            for expr, legend in queries
            for labels, points in source.history(expr)
        ]
        stack = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        span = (source.moment.start, source.moment.end)
        plots.curves(frame, shown, span, stack=stack, most=defaults.get("max"))
        return
    now = [(labels, _name(legend, labels), value) for expr, legend in queries for labels, value in source.now(expr)]
    if panel["type"] == "stat":
        steps = [(step.get("value"), step["color"]) for step in defaults.get("thresholds", {}).get("steps", [])]
        plots.number(frame, [(name, value) for _, name, value in now], steps)
    elif panel["type"] == "bargauge":
        plots.bars(frame, [(name, value) for _, name, value in now], defaults.get("max"))
    else:
        rows = [({k: v for k, v in labels.items() if k not in HIDDEN}, value) for labels, _, value in now]
        plots.table(frame, rows)


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend).strip()


def _filled(expr: str) -> str:
    return re.sub(r"\$(namespace|cluster|run|group|node)\b", ".*", expr.replace("$__rate_interval", "20s"))


def main() -> int:
    helm, prometheus = tools.find("helm"), tools.find("prometheus")
    if helm is None or prometheus is None:
        print("draw_dashboards: needs helm and prometheus; scripts/tools.py says how to install them", file=sys.stderr)
        return 2
    proof: Any = import_module("tests.monitoring.proof")  # mypy does not check tests
    with tempfile.TemporaryDirectory() as folder, proof.recorded(helm, prometheus, Path(folder)) as run:
        draw_all(run.prometheus.url, Moment(run.start, run.end, run.end - BEFORE_THE_END_S), PICTURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
