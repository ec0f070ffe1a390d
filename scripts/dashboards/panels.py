"""The dashboards, independent of Grafana: rows of panels, as the YAML files of this folder have them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
KINDS = ("number", "lines", "stacked", "bars", "table")
COUNT = "count"
"""An amount that is a whole number, on an axis with whole ticks. Other units are Grafana's, or become a suffix."""
NAMES: dict[str, str] = yaml.safe_load((FOLDER / "names.yaml").read_text(encoding="utf-8"))
_NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")


@dataclass(frozen=True, slots=True)
class Query:
    """A Prometheus expression, and the name of its series: {{label}} is the label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The values at which a figure turns yellow and red; if `warn` is above `bad`, low values are bad."""

    warn: float
    bad: float

    def steps(self) -> list[tuple[float | None, str]]:
        """Return colours in ascending order, each with the value at which it starts."""
        if self.warn <= self.bad:
            return [(None, "green"), (self.warn, "yellow"), (self.bad, "red")]
        return [(None, "red"), (self.bad, "yellow"), (self.warn, "green")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One question, and the queries that answer it."""

    kind: str
    title: str
    about: str = ""
    """The explanation that Grafana shows in the panel's corner: what it shows, and what to conclude."""
    queries: Sequence[Query]
    unit: str = COUNT
    width: int = 8
    """Columns, of the 24 that a dashboard has."""
    height: int = 7
    limits: Limits | None = None
    most: float | None = None
    """The upper end of the scale."""


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard, as rows of panels. The title of the first is the question that it answers."""

    name: str
    """The name of its file; its uid is `sdp-NAME`."""
    title: str
    rows: Sequence[Row]


def dashboards() -> list[Dashboard]:
    """Read all dashboards of this folder."""
    return [_dashboard(path) for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "names"]


def spelt_out(text: str) -> str:
    """Put its text in place of each name of names.yaml."""
    return _NAME.sub(lambda match: spelt_out(NAMES[match[1]]), text)


def _dashboard(path: Path) -> Dashboard:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = [Row(row["title"], [_panel(panel) for panel in row["panels"]]) for row in content["rows"]]
    return Dashboard(path.stem, content["title"], rows)


def _panel(content: dict[str, Any]) -> Panel:
    """Return a panel from its lines, of which the first is `KIND: title`, and a query is `expr` or `legend: expr`."""
    (kind, title), *rest = content.items()
    assert kind in KINDS, f"{kind}: expected one of {', '.join(KINDS)}"
    settings = {"width": 4, "height": 4, **dict(rest)} if kind == "number" else dict(rest)
    named = [("", query) if isinstance(query, str) else next(iter(query.items())) for query in settings["queries"]]
    settings["queries"] = [Query(spelt_out(expr), legend) for legend, expr in named]
    settings["about"] = spelt_out(settings.get("about", ""))
    if "limits" in settings:
        settings["limits"] = Limits(*settings["limits"])
    return Panel(kind=kind, title=title, **settings)
