"""The report of a training run: its curves, where its time went, what happened to it."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from sdp.console import duration, size
from sdp.datasets.audit import RUN
from sdp.datasets.fields import BadField, Fields
from sdp.datasets.output import read_json
from sdp.errors import DatasetError, NotFound
from sdp.model.checkpoints import COMPLETE, CONFIG, checkpoint_name, read_marker, steps_in
from sdp.report import charts
from sdp.report.charts import Line
from sdp.report.history import read_history
from sdp.report.page import Bar, Block, Drawing, Folded, Section, Table
from sdp.report.profile import SUMMARY, drawing
from sdp.report.samples import samples_blocks
from sdp.report.validation import validation_blocks
from sdp.storage import Storage

PHASES = ("phase-1", "phase-2")
"""The folders of a run of two phases, each a run of its own."""
_TROUBLE = {"recovered", "gave_up", "bad_step", "stalled"}
_LATEST = 30
_PARTS = {"data": "waiting for data", "copy": "copying it to the device", "checkpoint": "writing checkpoints"}

_Checkpoint = tuple[int, int, float, str, str]
"""Step, samples, loss, size, when it was written."""


def run_section(storage: Storage, pictures: int = 48) -> Section:
    """What there is to say of a run."""
    history = read_history(storage)
    metrics, events, problems = history.metrics, history.events, list(history.problems)
    whole = [step for step, complete in steps_in(storage).items() if complete]
    checkpoints = [row for step in whole if (row := _checkpoint(storage, step, problems)) is not None]
    blocks: list[Block] = []
    if metrics:
        blocks += _curves(metrics)
    if pictures:
        blocks += samples_blocks(storage, pictures, problems)
    blocks += _profile(storage, problems)
    if checkpoints:
        blocks.append(Table("Checkpoints", ("step", "samples", "loss", "size", "written"), checkpoints[::-1]))
    if events:
        blocks.append(_history(events))
    if problems:
        blocks.append(Table("Problems", ("what",), [(problem,) for problem in problems[:50]]))
    if whole:
        blocks += _configuration(storage.child(checkpoint_name(whole[-1])))
    ended = bool(events) and events[-1]["event"] == "end"
    step = _step(metrics, events, whole)
    figures = _figures(metrics) if metrics else _few(step, checkpoints)
    title = f"Training, {mode}" if (mode := _mode(storage)) else "Training"
    good = ended and not problems
    return Section(title, storage.uri, _verdict(events, step), good, figures, blocks, _glance(figures))


def _mode(storage: Storage) -> str:
    """How it trains, and in which phase, as far as the run says."""
    phase = next((name.replace("-", " ") for name in PHASES if storage.uri.endswith(f"/{name}")), "")
    identity = read_json(storage, RUN).get("identity") if storage.exists(RUN) else None
    mode = identity.get("data.mode") if isinstance(identity, dict) else None
    return ", ".join(word for word in (mode, phase) if isinstance(word, str) and word)


def _step(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], whole: Sequence[int]) -> int:
    """The newest that is known: a short run has no line of metrics, and one that goes on no end."""
    told = [int(event["step"]) for event in events if isinstance(event.get("step"), int)]
    return max([0, *told[-1:], *whole[-1:], *(int(line["step"]) for line in metrics[-1:])])


def _verdict(events: Sequence[Mapping[str, Any]], step: int) -> str:
    where = f"at step {step:,}" if step else "before its first step"
    recoveries = sum(event["event"] == "recovered" for event in events)
    survived = f", after {recoveries} recoveries" if recoveries else ""
    if events and events[-1]["event"] == "end":
        return f"Ended {where}{survived}: {events[-1]['reason']}."
    if events and events[-1]["event"] == "gave_up":
        return f"Gave up {where}{survived}: {'; '.join(map(str, events[-1].get('failures', [])[-1:]))}"
    return f"Not ended: the last that is known is {where}{survived}."


def _figures(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
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
    if last.get("encoders"):
        figures.append(("encoders", f"{last['encoders']:g}"))
    if last.get("cost"):
        figures.append(("cost", f"${last['cost']:,.2f}"))
    skipped = last.get("skipped") or 0
    if skipped:
        figures.append(("skipped steps", f"{skipped:,}"))
    return figures


def _few(step: int, checkpoints: Sequence[_Checkpoint]) -> list[tuple[str, str]]:
    """Of a run without a line of metrics what its newest checkpoint tells."""
    figures = [("step", f"{step:,}")]
    if checkpoints:
        _, samples, loss, *_ = checkpoints[-1]
        figures += [("samples", f"{samples:,}"), ("loss", f"{loss:.4f}")]
    return figures


def _glance(figures: Sequence[tuple[str, str]]) -> str:
    known = dict(figures)
    words = [f"{known['step']} steps"]
    words += [f"loss {known['loss']}"] if "loss" in known else []
    words += [f"{known['img/s']} img/s"] if "img/s" in known else []
    words += [known["trained for"]] if "trained for" in known else []
    return " · ".join(words)


def _curves(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    steps = [float(line["step"]) for line in metrics]

    def curve(name: str, of: Callable[[Mapping[str, Any]], float | None], *, faint: bool = False) -> Line:
        return Line(name, steps, [of(line) for line in metrics], faint)

    def half(title: str, *curves: Line) -> Drawing:
        return Drawing(title, charts.lines(curves, x_name="step", zero=True, half=True), half=True)

    each = curve("each step", lambda line: line.get("loss"), faint=True)
    loss = charts.lines([each, curve("smoothed", lambda line: line.get("loss_smoothed"))], x_name="step")
    blocks: list[Block] = [Drawing("Loss", loss), *_split(metrics)]
    blocks.append(half("Images a second, all workers", curve("", lambda line: line["samples_per_s"])))
    if any(line.get("memory_peak") for line in metrics):
        memory = [
            curve("allocated", lambda line: _gb(line.get("memory_allocated"))),
            curve("peak", lambda line: _gb(line.get("memory_peak"))),
        ]
        blocks.append(half("GPU memory, GB", *memory))
    if any(line.get("encoders_busy") is not None for line in metrics):
        blocks.append(half("Encoders at work, %", curve("", lambda line: _percent(line.get("encoders_busy")))))
    if any(line.get("mfu") for line in metrics):
        blocks.append(half("Of the GPUs' peak, %", curve("", lambda line: _percent(line.get("mfu")))))
    blocks += [
        half("Learning rate", curve("", lambda line: line.get("learning_rate"))),
        half("Gradient norm", curve("", lambda line: line.get("gradient_norm"))),
    ]
    return blocks + validation_blocks(metrics)


def _gb(count: float | None) -> float | None:
    return None if count is None else count / 1e9


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _split(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The mean time of a step, by what it went into, weighed by the steps that a line stands for."""
    weights = [float(b["step"] - a["step"]) for a, b in pairwise([{"step": 0}, *metrics])]
    weights = [max(weight, 0.0) for weight in weights]  # a run that went back to a checkpoint counts on from there
    whole = sum(weights) or 1.0
    names = dict.fromkeys(name for line in metrics for name in line.get("time") or {})
    split = []
    for name in names:
        seconds = [(line.get("time") or {}).get(name, 0.0) for line in metrics]
        mean = sum(weight * each for weight, each in zip(weights, seconds, strict=True)) / whole
        split.append((_PARTS.get(name, name), mean, f"{1000 * mean:,.1f} ms"))
    return [Bar("Where a step's time goes", split)] if split else []


def _checkpoint(run: Storage, step: int, problems: list[str]) -> _Checkpoint | None:
    folder = run.child(checkpoint_name(step))
    try:
        marker = Fields(read_marker(folder))
        state = marker.inner("state")
        loss = state.number("loss", above=-1e300, high=1e300) if state.has("loss") else 0.0
        return step, state.whole("samples"), loss, size(marker.whole("bytes")), marker.text("created")
    except BadField as error:
        problems.append(f"{folder.uri_of(COMPLETE)}: {error}; take another checkpoint")
    except DatasetError as error:
        problems.append(str(error))
    return None


def _configuration(checkpoint: Storage) -> list[Block]:
    try:
        return [Folded("Configuration", json.dumps(read_json(checkpoint, CONFIG), indent=1))]
    except (NotFound, DatasetError):  # `sdp inspect` tells what is wrong with a checkpoint
        return []


def _profile(run: Storage, problems: list[str]) -> list[Block]:
    if not run.exists(SUMMARY):
        return []
    try:
        profile = read_json(run, SUMMARY)
        return [Drawing(f"Where a step's time and memory goes, step {profile['last_step']:,}", drawing(profile))]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problems.append(f"{run.uri_of(SUMMARY)}: not what a profile is ({type(error).__name__}: {error}); delete it")
    except DatasetError as error:
        problems.append(str(error))
    return []


def _history(events: Sequence[Mapping[str, Any]]) -> Block:
    """What happened; ordinary checkpoints only where there is room."""
    told = [event for event in events if event["event"] != "checkpoint"] if len(events) > _LATEST else list(events)
    rows = []
    for event in told[-_LATEST:]:
        details = {key: value for key, value in event.items() if key not in ("time", "event")}
        mark = "⚠ " if event["event"] in _TROUBLE else ""
        rows.append((_when(event["time"]), mark + event["event"], _details(details)))
    return Table("History", ("when (UTC)", "what", "details"), rows)


def _when(time: str) -> str:
    return time.replace("T", " ").removesuffix("+00:00")


def _details(details: Mapping[str, Any]) -> str:
    words = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in details.items()
    ]
    text = " · ".join(words)
    return text if len(text) < 300 else text[:299] + "…"
