"""The parts of a dashboard, independent of Grafana: rows of panels, and each panel's Prometheus queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "lines", "stacked", "bars", "table"]

IMAGES_PER_SECOND, STEPS_PER_SECOND, ROWS_PER_SECOND, TOKENS_PER_SECOND, ERRORS_PER_SECOND = (
    "img/s", "steps/s", "rows/s", "tokens/s", "errors/s",
)  # fmt: skip
BYTES, BYTES_PER_SECOND, RATIO, SECONDS, AMOUNT, CELSIUS, WATTS, HERTZ, TIMES, PLAIN = (
    "bytes", "Bps", "percentunit", "s", "short", "celsius", "watt", "hertz", "×", "none",
)  # fmt: skip
"""Grafana's units; one that Grafana does not know is shown as a suffix."""
COUNT = "count"
"""An amount that is a whole number, on an axis with whole ticks."""

GREEN, YELLOW, RED = "green", "yellow", "red"
FULL = 24
"""The number of columns of a dashboard."""


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
            return [(None, GREEN), (self.warn, YELLOW), (self.bad, RED)]
        return [(None, RED), (self.bad, YELLOW), (self.warn, GREEN)]


@dataclass(frozen=True, slots=True)
class Panel:
    """One question, and the queries that answer it."""

    title: str
    about: str
    """The explanation that Grafana shows in the panel's corner: what it shows, and what to conclude."""
    queries: Sequence[Query]
    kind: Kind = "lines"
    unit: str = COUNT
    width: int = 8
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
    """A dashboard, as rows of panels."""

    name: str
    """The name of its file; its uid is `sdp-NAME`."""
    title: str
    question: str
    """The question that the first row answers."""
    rows: Sequence[Row]


def number(title: str, about: str, *queries: Query, unit: str = COUNT, limits: Limits | None = None) -> Panel:
    """Return a single figure, one of the six in a first row."""
    return Panel(title, about, queries, "number", unit, width=4, height=4, limits=limits)


def lines(
    title: str, about: str, *queries: Query, unit: str = COUNT, width: int = 8, most: float | None = None
) -> Panel:
    return Panel(title, about, queries, "lines", unit, width, most=most)


def stacked(
    title: str, about: str, *queries: Query, unit: str = COUNT, width: int = 8, most: float | None = None
) -> Panel:
    return Panel(title, about, queries, "stacked", unit, width, most=most)


def bars(
    title: str, about: str, *queries: Query, unit: str = COUNT, width: int = 8, most: float | None = None
) -> Panel:
    return Panel(title, about, queries, "bars", unit, width, most=most)


def table(title: str, about: str, *queries: Query, unit: str = COUNT, width: int = 8) -> Panel:
    return Panel(title, about, queries, "table", unit, width)
