"""The section of a training run: its curves, time, samples and history."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from sdp import charts
from sdp.charts import Line
from sdp.config.train import PHASES
from sdp.console import clock, counted, duration, size
from sdp.datasets.audit import RUN
from sdp.datasets.output import read_json
from sdp.errors import DatasetError, NotFound
from sdp.report.inspect import TROUBLE, Run, describe_run
from sdp.report.page import Bar, Block, Folded, PageSection, Strips, Svg, Table, Tile, listing
from sdp.storage import Storage
from sdp.train.run_folder import PROFILE, RunFolder, samples_folder

_EVENTS = 30
"""Limit on the rows of the history. Ordinary checkpoints are omitted if there are more events."""
_PARTS = {"data": "waiting for data", "copy": "copying to the device", "checkpoint": "writing checkpoints"}
_SAMPLE_STEPS = 6
"""Limit on the steps whose samples are shown."""
_CURVES = 4
"""Limit on the ranges of timesteps with a validation curve, besides that of all timesteps."""
_CHARTS: Sequence[tuple[str, float, Mapping[str, str]]] = (
    ("Images per second, all workers", 1, {"samples_per_s": ""}),
    ("GPU memory, GB", 1e-9, {"memory_allocated": "allocated", "memory_peak": "peak"}),
    ("Busy encoders, %", 100, {"encoders_busy": ""}),
    ("Share of the GPUs' peak, %", 100, {"mfu": ""}),
    ("Learning rate", 1, {"learning_rate": ""}),
    ("Gradient norm", 1, {"gradient_norm": ""}),
)
"""Charts of half the page's width: the title, a factor, and the curves' names by their keys in the metrics."""


def run_sections(storage: Storage, pictures: int = 48) -> list[PageSection]:
    """Return the section of a single-phase run, and that of its plan if prices are known."""
    run = describe_run(storage)
    metrics, events, problems = run.metrics, run.events, list(run.problems)
    blocks: list[Block] = _curves(metrics) if metrics else []
    if pictures:
        blocks += _samples(RunFolder(storage), pictures, problems)
    if run.profile is not None:
        blocks.append(Folded("Profile: where a step's time and memory go", storage.read(PROFILE).decode()))
    if run.checkpoints:
        rows = [(c["step"], c["samples"], c["loss"] or 0.0, size(c["bytes"]), c["created"]) for c in run.checkpoints]
        blocks.append(Table("Checkpoints", ("step", "samples", "loss", "size", "written"), rows))
    if events:
        blocks.append(_history(events))
    blocks += listing("Problems", problems)
    if run.newest is not None:
        blocks.append(Folded("Configuration", json.dumps(run.newest.config, indent=1)))
    ended = bool(events) and events[-1]["event"] == "end"
    figures = _figures(metrics, ended=ended) if metrics else _few_figures(run)
    title = f"Training, {mode}" if (mode := _mode(storage)) else "Training"
    verdict, good = _verdict(run), ended and not problems
    return [PageSection(title, storage.uri, verdict, good, figures, blocks, _glance(figures))]


def _mode(storage: Storage) -> str:
    """Return a run's training mode and phase, as far as they are known."""
    phase = next((name.replace("-", " ") for name in PHASES if storage.uri.endswith(f"/{name}")), "")
    identity = read_json(storage, RUN).get("identity") if storage.exists(RUN) else None
    mode = identity.get("data.mode") if isinstance(identity, dict) else None
    return ", ".join(word for word in (mode, phase) if isinstance(word, str) and word)


def _step(run: Run) -> int:
    """Return the newest known step, from events if there are no metrics yet."""
    reported = [int(event["step"]) for event in run.events if isinstance(event.get("step"), int)]
    return max([run.step or 0, *reported[-1:]])


def _verdict(run: Run) -> str:
    step, last = _step(run), run.events[-1] if run.events else dict[str, Any](event=None)
    where = f"at step {step:,}" if step else "before its first step"
    recovered = run.history.get("recovered", 0)
    recoveries = f", after {counted(recovered, 'recovery', 'recoveries')}" if recovered else ""
    match last["event"]:
        case "end":
            return f"Ended {where}{recoveries}: {last['reason']}."
        case "gave_up":
            return f"Gave up {where}{recoveries}: {'; '.join(map(str, last.get('failures', [])[-1:]))}"
    return f"Not ended: last known {where}{recoveries}."


def _ahead(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the expected end and cost of a running job, by its newest line."""
    end = "both phases' end" if last.get("phases") else "the end"
    return [
        ("both phases end" if last.get("phases") else "ends", clock(last["finish_time"]) if last.get("left_s") else ""),
        (f"GPU-hours at {end}", f"{last['final_gpu_hours']:,.2f}" if last.get("final_gpu_hours") else ""),
        (f"cost at {end}", f"{last['final_cost']:,.2f}" if last.get("final_cost") else ""),
    ]


def _figures(metrics: Sequence[Mapping[str, Any]], *, ended: bool) -> list[tuple[str, str]]:
    last = metrics[-1]
    shares = [line["mfu"] for line in metrics if line.get("mfu")]
    peaks = [line["memory_peak"] for line in metrics if line.get("memory_peak")]
    loss = last.get("loss_smoothed")
    figures = [
        ("step", f"{last['step']:,}"),
        ("samples", f"{last['samples']:,}"),
        ("epochs", f"{last['epoch'] + last['epoch_done']:.2f}"),
        ("loss", f"{loss:.4f}" if loss is not None else ""),
        ("img/s", f"{median(line['samples_per_s'] for line in metrics):,.0f}"),
        ("workers", f"{last['workers']}"),
        ("trained for", duration(last["seconds"])),
        ("of GPU peak", f"{median(shares):.1%}" if shares else ""),
        ("GPU memory", size(max(peaks)) if peaks else ""),
        ("encoders", f"{last['encoders']:g}" if last.get("encoders") else ""),
        ("GPU-hours", f"{last['gpu_hours']:,.2f}" if last.get("gpu_hours") else ""),
        ("cost", f"{last['cost']:,.2f}" if last.get("cost") else ""),
        *_ahead(last if not ended else {}),
        ("skipped steps", f"{last['skipped']:,}" if last.get("skipped") else ""),
    ]
    return [(name, value) for name, value in figures if value]


def _few_figures(run: Run) -> list[tuple[str, str]]:
    """Return figures from the newest checkpoint, for a run without metrics."""
    figures = [("step", f"{_step(run):,}")]
    for checkpoint in run.checkpoints[:1]:
        figures += [("samples", f"{checkpoint['samples']:,}"), ("loss", f"{checkpoint['loss'] or 0.0:.4f}")]
    return figures


def _glance(figures: Sequence[tuple[str, str]]) -> str:
    known = dict(figures)
    forms = (("step", "{} steps"), ("loss", "loss {}"), ("img/s", "{} img/s"), ("trained for", "{}"))
    return " · ".join(form.format(known[name]) for name, form in forms if name in known)


def _curves(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    steps = [float(line["step"]) for line in metrics]

    def curve(name: str, key: str, factor: float = 1, *, faint: bool = False) -> Line:
        values = [line.get(key) for line in metrics]
        return Line(name, steps, [None if value is None else factor * value for value in values], faint)

    loss = [curve("each step", "loss", faint=True), curve("smoothed", "loss_smoothed")]
    blocks: list[Block] = [Svg("Loss", charts.lines(loss, x_name="step")), *_split(metrics)]
    for title, factor, names in _CHARTS:
        if any(line.get(key) is not None for line in metrics for key in names):
            curves = [curve(name, key, factor) for key, name in names.items()]
            blocks.append(Svg(title, charts.lines(curves, x_name="step", zero=True, half=True), half=True))
    return blocks + _validation(metrics)


def _split(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the mean time of a step by activity. Each line is weighted by its number of steps."""
    weights = [float(b["step"] - a["step"]) for a, b in pairwise([{"step": 0}, *metrics])]
    weights = [max(weight, 0.0) for weight in weights]  # negative after a return to a checkpoint
    total = sum(weights) or 1.0
    parts = []
    for name in dict.fromkeys(name for line in metrics for name in line.get("time") or {}):
        seconds = [(line.get("time") or {}).get(name, 0.0) for line in metrics]
        mean = sum(weight * value for weight, value in zip(weights, seconds, strict=True)) / total
        parts.append((_PARTS.get(name, name), mean, f"{1000 * mean:,.1f} ms"))
    return [Bar("Where a step's time goes", parts)] if parts else []


def _validation(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the loss on held-out rows: curves, and the first and last values by timestep."""
    measured = {line["validation_step"]: line["validation"] for line in metrics if line.get("validation")}
    if not measured:
        return []
    steps, losses = list(measured), list(measured.values())
    names = [name for name in losses[-1] if name != "all"]
    shown = [names[n * (len(names) - 1) // (_CURVES - 1)] for n in range(min(_CURVES, len(names)))]
    curves = [Line(name, steps, [point.get(name) for point in losses]) for name in ("all", *dict.fromkeys(shown))]
    rows = [(name, *(float(point[name]) for point in (losses[0], losses[-1]) if name in point)) for name in losses[-1]]
    title, header = "Loss on held-out rows", [f"at step {step:,}" for step in (steps[0], steps[-1])]
    return [
        Svg(f"{title}, by timestep", charts.lines(curves, x_name="step")),
        Table(title, ("timesteps", *header), rows),
    ]


def _samples(run: RunFolder, pictures: int, problems: list[str]) -> list[Block]:
    """Return the pictures drawn during training, by prompt, from the first step to the last."""
    available = run.sample_steps()
    count = min(_SAMPLE_STEPS, len(available))
    steps = [available[round(n * (len(available) - 1) / (count - 1))] for n in range(count)] if count > 1 else available
    prompts = dict[int, dict[str, str]]()
    for step in steps:
        try:
            prompts[step] = run.sample_prompts(step)
        except DatasetError as error:
            problems.append(str(error))
    names = sorted({name for files in prompts.values() for name in files})[: max(1, pictures // max(1, len(steps)))]
    tiles = {
        name: [_tile(run, step, name, files[name]) for step, files in prompts.items() if name in files]
        for name in names
    }
    return [Strips("Drawn during training", [(row[0].caption, row) for row in tiles.values()])] if available else []


def _tile(run: RunFolder, step: int, name: str, prompt: str) -> Tile:
    try:
        data = run.storage.read(f"{samples_folder(step)}/{name}")
    except NotFound:  # deleted since
        data = None
    return Tile(data, prompt, f"step {step:,}")


def _history(events: Sequence[Mapping[str, Any]]) -> Block:
    notable = [event for event in events if event["event"] != "checkpoint"] if len(events) > _EVENTS else list(events)
    rows = []
    for event in notable[-_EVENTS:]:
        details = " · ".join(
            f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in event.items()
            if key not in ("time", "event")
        )
        mark = "⚠ " if event["event"] in (*TROUBLE, "stalled") else ""
        time = event["time"].replace("T", " ").removesuffix("+00:00")
        rows.append((time, mark + event["event"], details if len(details) < 300 else details[:299] + "…"))
    return Table("History", ("time (UTC)", "event", "details"), rows)
