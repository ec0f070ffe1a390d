"""What a training run has written down of itself, line by line: lines that are damaged are counted, and left out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sdp.datasets.concurrently import ordered_map
from sdp.errors import NotFound
from sdp.model.metric_files import files_in, joined
from sdp.storage import Storage

EVENTS = "events.jsonl"

Line = dict[str, Any]

_WHOLE = ("step", "samples", "epoch", "workers")
_NUMBERS = ("epoch_done", "samples_per_s", "seconds")
_PERHAPS = (
    "loss",
    "loss_smoothed",
    "gradient_norm",
    "learning_rate",
    "skipped",
    "cost",
    "mfu",
    "memory_allocated",
    "memory_peak",
    "validation_step",
    "encoders",
    "encoders_busy",
)
_MAPPINGS = ("time", "validation")


@dataclass(frozen=True)
class History:
    """Metrics and events that are what they should be."""

    metrics: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """A line for each file with damaged lines."""


def read_history(run: Storage) -> History:
    """All that is known; a file that is not there yet has no lines."""
    problems: list[str] = []
    files = files_in(run)
    read = ordered_map(lambda file: read_lines(run, file[2], is_metric), files, workers=8)
    lines = []
    for (_, after, _), (some, damaged) in zip(files, read, strict=True):
        lines.append((after, some))
        problems += damaged
    return History(joined(lines), list(_lines(run, EVENTS, is_event, problems)), problems)


def read_lines(run: Storage, name: str, is_good: Callable[[Any], bool]) -> tuple[list[Line], list[str]]:
    """The good lines of a file, and what is to be said of the others."""
    problems: list[str] = []
    return list(_lines(run, name, is_good, problems)), problems


def _lines(run: Storage, name: str, is_good: Callable[[Any], bool], problems: list[str]) -> Iterator[Line]:
    try:
        data = run.read(name)
    except NotFound:
        return
    damaged, first = 0, 0
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        line = _parsed(text)
        if is_good(line):
            yield line
        else:
            damaged, first = damaged + 1, first or number
    if damaged:
        what = "line is" if damaged == 1 else "lines are"
        problems.append(f"{run.uri_of(name)}: {damaged:,} {what} damaged and not counted, the first is line {first:,}")


def _parsed(text: bytes) -> Any:
    try:
        # NaN is no JSON, but older versions wrote it where there was no number.
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def is_metric(line: Any) -> bool:
    """Whether it is a line of metrics that can be drawn and told."""
    return (
        isinstance(line, dict)
        and all(isinstance(line.get(name), int) and not isinstance(line[name], bool) for name in _WHOLE)
        and all(_is_number(line.get(name)) for name in _NUMBERS)
        and all(line.get(name) is None or _is_number(line[name]) for name in _PERHAPS)
        and all(_is_numbers(line.get(name, {})) for name in _MAPPINGS)
        and (not line.get("validation") or line.get("validation_step") is not None)
    )


def is_event(line: Any) -> bool:
    """Whether it is a line of events.jsonl."""
    if not isinstance(line, dict) or not all(isinstance(line.get(name), str) for name in ("time", "event")):
        return False
    failures = line.get("failures", [])
    needed = {"end": "reason", "bad_step": "verdict"}.get(line["event"])
    return isinstance(failures, list) and (needed is None or isinstance(line.get(needed), str))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_numbers(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_number(number) for number in value.values()))
