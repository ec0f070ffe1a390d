"""The report of a training run: its curves, where its time went, what happened to it."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from sdp.console import duration, size
from sdp.errors import NotFound
from sdp.model.checkpoints import CONFIG, checkpoint_name, read_marker, steps_in
from sdp.report import charts
from sdp.report.charts import Line
from sdp.report.page import Block, Drawing, Folded, Section, Table
from sdp.report.profile import SUMMARY, drawing
from sdp.report.samples import samples_blocks
from sdp.report.validation import validation_blocks
from sdp.storage import Storage

EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
_TROUBLE = {"recovered", "gave_up", "bad_step", "stalled"}
_LATEST = 30


def run_section(storage: Storage, pictures: int = 48) -> Section:
    """What there is to say of a run."""
    metrics, events = _lines(storage, METRICS), _lines(storage, EVENTS)
    whole = [step for step, complete in steps_in(storage).items() if complete]
    markers = {step: read_marker(storage.child(checkpoint_name(step))) for step in whole}
    last = metrics[-1] if metrics else {}
    blocks: list[Block] = []
    if metrics:
        blocks += _curves(metrics)
    if pictures:
        blocks += samples_blocks(storage, pictures)
    if storage.exists(SUMMARY):
        profile = json.loads(storage.read(SUMMARY))
        blocks.append(Drawing(f"Where a step's time and memory goes, step {profile['last_step']:,}", drawing(profile)))
    if markers:
        blocks.append(_checkpoints(markers))
    if events:
        blocks.append(_history(events))
    if whole:
        config = storage.child(checkpoint_name(whole[-1])).read(CONFIG)
        blocks.append(Folded("Configuration", json.dumps(json.loads(config), indent=1)))
    ended = bool(events) and events[-1]["event"] == "end"
    return Section("Training", storage.uri, _verdict(events, last), ended, _figures(metrics), blocks)


def _lines(storage: Storage, name: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in storage.read(name).splitlines()]
    except NotFound:
        return []


def _verdict(events: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> str:
    where = f"at step {last['step']:,}" if last else "before its first step"
    recoveries = sum(event["event"] == "recovered" for event in events)
    survived = f", after {recoveries} recoveries" if recoveries else ""
    if events and events[-1]["event"] == "end":
        return f"Ended {where}{survived}: {events[-1]['reason']}."
    if events and events[-1]["event"] == "gave_up":
        return f"Gave up {where}{survived}: {'; '.join(events[-1].get('failures', [])[-1:])}"
    return f"Not ended: the last that is known is {where}{survived}."


def _figures(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if not metrics:
        return []
    last = metrics[-1]
    figures = [
        ("step", f"{last['step']:,}"),
        ("samples", f"{last['samples']:,}"),
        ("epochs", f"{last['epoch'] + last['epoch_done']:.2f}"),
        ("img/s", f"{median(line['samples_per_s'] for line in metrics):,.0f}"),
        ("workers", f"{last['workers']}"),
        ("trained for", duration(last["seconds"])),
    ]
    if last.get("loss_smoothed") is not None:
        figures.insert(3, ("loss", f"{last['loss_smoothed']:.4f}"))
    if any(line.get("mfu") for line in metrics):
        figures.append(("of peak", f"{median(line['mfu'] for line in metrics if line.get('mfu')):.1%}"))
    peak = [line["memory_peak"] for line in metrics if line.get("memory_peak")]
    if peak:
        figures.append(("GPU memory", size(max(peak))))
    if last.get("cost"):
        figures.append(("cost", f"${last['cost']:,.2f}"))
    skipped = last.get("skipped", 0)
    if skipped:
        figures.append(("skipped steps", f"{skipped:,}"))
    return figures


def _curves(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    steps = [float(line["step"]) for line in metrics]

    def curve(name: str, of: Callable[[Mapping[str, Any]], float | None], *, faint: bool = False) -> Line:
        return Line(name, steps, [of(line) for line in metrics], faint)

    blocks: list[Block] = [
        Drawing(
            "Loss",
            charts.lines(
                [
                    curve("each step", lambda line: line["loss"], faint=True),
                    curve("smoothed", lambda line: line["loss_smoothed"]),
                ],
                x_name="step",
            ),
        ),
        Drawing(
            "Images a second, all workers",
            charts.lines([curve("", lambda line: line["samples_per_s"])], x_name="step", zero=True),
        ),
        Drawing("Where a step's time goes", charts.shares(_split(metrics))),
        Drawing(
            "Learning rate", charts.lines([curve("", lambda line: line["learning_rate"])], x_name="step", zero=True)
        ),
        Drawing(
            "Gradient norm", charts.lines([curve("", lambda line: line["gradient_norm"])], x_name="step", zero=True)
        ),
    ]
    if any(line.get("memory_peak") for line in metrics):
        memory = [
            curve("allocated", lambda line: _gb(line.get("memory_allocated"))),
            curve("peak", lambda line: _gb(line.get("memory_peak"))),
        ]
        blocks.append(Drawing("GPU memory, GB", charts.lines(memory, x_name="step", zero=True)))
    return blocks + validation_blocks(metrics)


def _gb(count: float | None) -> float | None:
    return None if count is None else count / 1e9


def _split(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, str]]:
    """The mean time of a step, by what it went into, weighed by the steps that a line stands for."""
    weights = [float(b["step"] - a["step"]) for a, b in pairwise([{"step": 0}, *metrics])]
    weights = [max(weight, 0.0) for weight in weights]  # a run that went back to a checkpoint counts on from there
    whole = sum(weights) or 1.0
    names = dict.fromkeys(name for line in metrics for name in line.get("time", {}))
    split = []
    for name in names:
        mean = sum(w * line["time"].get(name, 0.0) for w, line in zip(weights, metrics, strict=True)) / whole
        split.append((name, mean, f"{1000 * mean:,.1f} ms"))
    return split


def _checkpoints(markers: Mapping[int, Mapping[str, Any]]) -> Block:
    rows = [
        (
            step,
            marker["state"]["samples"],
            float(marker["state"]["loss"] or 0.0),
            size(marker["bytes"]),
            marker["created"],
        )
        for step, marker in sorted(markers.items(), reverse=True)
    ]
    return Table("Checkpoints", ("step", "samples", "loss", "size", "written"), rows)


def _history(events: Sequence[Mapping[str, Any]]) -> Block:
    """What happened; ordinary checkpoints only where there is room."""
    told = [event for event in events if event["event"] != "checkpoint"] if len(events) > _LATEST else list(events)
    rows = []
    for event in told[-_LATEST:]:
        details = {key: value for key, value in event.items() if key not in ("time", "event")}
        mark = "⚠ " if event["event"] in _TROUBLE else ""
        rows.append((event["time"].replace("T", " "), mark + event["event"], _details(details)))
    return Table("History", ("when", "what", "details"), rows)


def _details(details: Mapping[str, Any]) -> str:
    words = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in details.items()
    ]
    text = " · ".join(words)
    return text if len(text) < 300 else text[:299] + "…"
