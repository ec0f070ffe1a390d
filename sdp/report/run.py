"""The sections of a training run and of a checkpoint: loss, time, samples, history, and what it was made from."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

from sdp import charts
from sdp.charts import Line
from sdp.config.train import PHASES
from sdp.console import counted, size, spent
from sdp.errors import DatasetError, NotFound
from sdp.report.inspect import TROUBLE, Checkpoint, Run
from sdp.report.page import Bar, Block, Folded, PageSection, Strips, Svg, Table, Tile, listing
from sdp.storage import Storage
from sdp.train.run_folder import PROFILE, RunFolder, samples_folder

_EVENTS = 30
"""Limit on the rows of the history. Ordinary checkpoints are omitted if there are more events."""
_PARTS = {"data": "waiting for data", "copy": "copying to the device", "checkpoint": "writing checkpoints"}
_SAMPLE_STEPS = 6
"""Limit on the steps whose samples are shown."""


def run_section(run: Run, storage: Storage, pictures: int) -> PageSection:
    """Return the section of a single-phase run, with that of its newest checkpoint in it."""
    problems = list(run.problems)
    samples = _samples(RunFolder(storage), pictures, problems)
    checkpoints = [(c["step"], c["samples"], c["loss"] or 0.0, size(c["bytes"]), c["created"]) for c in run.checkpoints]
    blocks = [
        listing("Problems", problems),
        *(_measures(run.metrics) if run.metrics else []),
        samples,
        Table("Checkpoints", ("step", "samples", "loss", "size", "written"), checkpoints),
        listing("Incomplete checkpoints", [f"step {step:,}" for step in run.incomplete], "step"),
        _history(run.events),
        Table("Bad rows", ("reason", "rows"), list(run.bad_rows.items())),
        listing("Profile", [run.profile] if run.profile else [], "file"),
        *([Folded("Where a step's time and memory go", storage.read(PROFILE).decode())] if run.profile else []),
        *(_contents(run.newest) if run.newest is not None else []),
    ]
    name = storage.uri.rpartition("/")[2]
    title = f"Training, {name.replace('-', ' ')}" if name in PHASES else "Training"
    recovered = run.history.get("recovered", 0)
    recoveries = f", after {counted(recovered, 'recovery', 'recoveries')}" if recovered else ""
    verdict = f"At step {run.step or 0:,}{recoveries}; {run.state}."
    return PageSection(title, run.uri, verdict, run.state.startswith("ended") and not problems, _figures(run), blocks)


def checkpoint_section(c: Checkpoint) -> PageSection:
    """Return the section of a checkpoint."""
    verdict = f"Written {c.created} by {counted(c.workers, 'worker')}, sdp {c.sdp}."
    if c.problems:
        verdict = f"Damaged: {counted(len(c.problems), 'problem')}, listed below."
    rows_in_epoch = f" of {c.epoch_rows:,} rows" if c.epoch_rows else ""
    done = f", {c.epoch_done:.1%}{rows_in_epoch} consumed" if c.epoch_done is not None else ""
    figures = [
        ("step", f"{c.step:,}"),
        ("skipped steps", f"{c.skipped:,}" * bool(c.skipped)),
        ("samples", f"{c.samples:,}"),
        ("epoch", f"{c.epoch}{done}"),
        ("in the ledger", f"{counted(sum(c.consumed.values()), 'row')} of {counted(len(c.consumed), 'epoch')}"),
        ("loss", f"{c.loss:.4f}" if c.loss is not None else ""),
        ("trained for", spent(c.seconds, c.gpu_hours, c.cost)),
        ("size", size(c.bytes)),
    ]
    return PageSection(
        "Checkpoint", c.uri, verdict, not c.problems, figures, [listing("Problems", c.problems), *_contents(c)]
    )


def _contents(c: Checkpoint) -> list[Block]:
    """Return a checkpoint's tensors, sources and configuration."""
    tensors = [(kind, s["tensors"], s["values"], size(s["bytes"])) for kind, s in c.sizes.items()]
    digest = f", digest {c.model['digest'][:12]}…" if c.model.get("digest") else ""
    sources = [("sdp", c.sdp), ("model", f"{c.model.get('source', 'unknown')}{digest}")]
    sources += [("started from the weights of", c.begun_from)] if c.begun_from else []
    sources += [("trained on", uri) for uri in c.lineage]
    return [
        Table("Tensors", ("stored", "tensors", "values", "size"), tensors),
        Table("Made from", ("", "source"), sources),
        Table("Configuration", ("key", "not the default"), [(key, json.dumps(v)) for key, v in c.changed.items()]),
        Folded("Whole configuration", json.dumps(c.config, indent=1)),
    ]


def _figures(run: Run) -> list[tuple[str, str]]:
    """Return a run's figures, from the newest line of its metrics."""
    figures, last = [("step", f"{run.step or 0:,}")], run.last
    if not last:
        return figures
    loss, mfu, memory = last.get("loss_smoothed"), last.get("mfu"), last.get("memory_peak")
    return [
        *figures,
        ("samples", f"{last['samples']:,}"),
        ("epochs", f"{last['epoch'] + last['epoch_done']:.2f}"),
        ("loss", f"{loss:.4f}" if loss is not None else ""),
        ("img/s", f"{median(line['samples_per_s'] for line in run.metrics):,.0f}"),
        ("workers", f"{last['workers']}"),
        ("trained for", spent(last["seconds"], last.get("gpu_hours") or 0.0, run.newest.cost if run.newest else 0.0)),
        ("of GPU peak", f"{mfu:.1%}" if mfu else ""),
        ("GPU memory", size(memory) if memory else ""),
        ("skipped steps", f"{last['skipped']:,}" if last.get("skipped") else ""),
    ]


def _measures(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the loss of the batches and on held-out rows, and the mean time of a step by activity."""
    steps = [line["step"] for line in metrics]
    held_out = {line["validation_step"]: line["validation"] for line in metrics if line.get("validation")}
    curves = [
        Line("each step", steps, [line.get("loss") for line in metrics], faint=True),
        Line("smoothed", steps, [line.get("loss_smoothed") for line in metrics]),
        Line("held-out rows", [*held_out], [losses.get("all") for losses in held_out.values()]),
    ]
    ends = [*held_out][:1] + [*held_out][1:][-1:]
    rows = [(name, *(held_out[step].get(name, "") for step in ends)) for name in (held_out[ends[-1]] if ends else ())]
    times = [line["time"] for line in metrics if line.get("time")]
    means = {name: fmean(time.get(name, 0.0) for time in times) for name in dict.fromkeys(chain(*times))}
    return [
        Svg("Loss", charts.lines([curve for curve in curves if curve.x], x_name="step")),
        Bar("Time of a step", [(_PARTS.get(name, name), s, f"{1000 * s:,.1f} ms") for name, s in means.items()]),
        Table("Loss on held-out rows", ("timesteps", *(f"at step {step:,}" for step in ends)), rows),
    ]


def _samples(run: RunFolder, pictures: int, problems: list[str]) -> Block:
    """Return the pictures drawn during training, by prompt, from the first step to the last."""
    available, strips = run.sample_steps(), dict[str, list[Tile]]()
    last = len(available) - 1
    steps = sorted({available[n * last // (_SAMPLE_STEPS - 1)] for n in range(_SAMPLE_STEPS) if available and pictures})
    for step in steps:
        try:
            for name, prompt in sorted(run.sample_prompts(step).items())[: max(1, pictures // len(steps))]:
                data = run.storage.read(f"{samples_folder(step)}/{name}")
                strips.setdefault(name, []).append(Tile(data, prompt, f"step {step:,}"))
        except (DatasetError, NotFound) as error:
            problems.append(str(error))
    return Strips("Drawn during training", [(tiles[0].caption, tiles) for tiles in strips.values()])


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
