"""What a dashboard is made of, without a word of Grafana's: rows of panels, and what each asks Prometheus."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "lines", "stacked", "bars", "table"]

PER_SECOND, IMAGES_PER_SECOND, BYTES, BYTES_PER_SECOND = "cps", "img/s", "bytes", "Bps"
RATIO, SECONDS, COUNT, CELSIUS, WATTS, HERTZ, TIMES, PLAIN = (
    "percentunit", "s", "short", "celsius", "watt", "hertz", "×", "none",
)  # fmt: skip
"""Grafana's units; one that it does not know is written behind the number."""

GREEN, YELLOW, RED = "green", "yellow", "red"
FULL = 24
"""Columns of a dashboard."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and what its series are called: {{label}} is the label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """From which values on it is no longer good, and when it is bad; the other way round where low is bad."""

    warn: float
    bad: float

    def steps(self) -> list[tuple[float | None, str]]:
        """Colours from below to above, each from its value on."""
        if self.warn <= self.bad:
            return [(None, GREEN), (self.warn, YELLOW), (self.bad, RED)]
        return [(None, RED), (self.bad, YELLOW), (self.warn, GREEN)]


@dataclass(frozen=True, slots=True)
class Panel:
    """One question and its answer."""

    title: str
    about: str
    """What it shows and what to make of it; Grafana shows it at the panel's corner."""
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
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    """Of its file, and behind `sdp-` its uid."""
    title: str
    question: str
    """What the first row answers."""
    rows: Sequence[Row]


def number(title: str, about: str, *queries: Query, unit: str = COUNT, limits: Limits | None = None) -> Panel:
    """A figure of the first row, of which there are six."""
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
