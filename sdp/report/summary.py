"""Descriptions as text, for `sdp inspect`."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sdp.console import counted, size, spent, table
from sdp.datasets.inspect import Description
from sdp.datasets.inspect import summary as dataset_summary
from sdp.report.inspect import Checkpoint, Evaluation, Run

_SHOWN, _SPANS = 10, 4


def summary(description: Description | Run | Checkpoint | Evaluation) -> str:
    """Return a description as text."""
    match description:
        case Description():
            return dataset_summary(description)
        case Evaluation():
            figures = [(key, json.dumps(value)) for key, value in description.result.items() if key != "config"]
            return "\n".join([description.uri, "evaluation", "", table(figures)])
        case Run():
            lines = _run_lines(description)
        case Checkpoint():
            lines = _checkpoint_lines(description)
    if description.problems:
        lines += ["", f"{counted(len(description.problems), 'problem')}:", *(f"  {p}" for p in description.problems)]
    return "\n".join(lines)


def _run_lines(run: Run) -> list[str]:
    lines = [run.uri, f"run, {run.state}, {size(run.bytes)}"]
    if run.phases:
        for phase in run.phases:
            lines += ["", *_run_lines(phase)]
        return lines
    if run.last:
        lines += ["", table(_last(run.last, run.step))]
    if run.checkpoints:
        rows = [
            (c["step"], f"{c['samples']:,}", c["epoch"], _number(c["loss"]), size(c["bytes"]), c["created"])
            for c in run.checkpoints[:_SHOWN]
        ]
        lines += ["", table(rows, ("checkpoint", "samples", "epoch", "loss", "tensors", "written"))]
        if len(run.checkpoints) > _SHOWN:
            lines.append(f"and {len(run.checkpoints) - _SHOWN} older checkpoints")
    if run.incomplete:
        lines.append(f"incomplete: {', '.join(f'step {step}' for step in run.incomplete)}")
    lines += ["", *_history_lines(run.history, run.trouble)]
    if run.bad_rows:
        lines += ["", table([(reason, f"{n:,}") for reason, n in run.bad_rows.items()], ("bad rows", "count"))]
    if run.profile:
        lines += ["", f"profile: {run.profile}"]
    if run.newest is not None:
        lines += ["", "newest checkpoint:", *_checkpoint_lines(run.newest, alone=False)]
    return lines


def _last(line: Mapping[str, Any], step: int | None) -> list[tuple[str, str]]:
    """Return the newest line of the metrics as a table; `step` may be newer."""
    older, slow = step is not None and step > line["step"], line.get("slowest")
    rows = [
        ("step", f"{step:,}; the following is for step {line['step']:,}" if older else f"{line['step']:,}"),
        ("samples", f"{line['samples']:,}"),
        ("epoch", f"{line['epoch']}, {line['epoch_done']:.1%} done"),
        ("loss, smoothed", _number(line.get("loss_smoothed"))),
        ("img/s", f"{line['samples_per_s']:,.1f} over {counted(line['workers'], 'worker')}"),
        ("of GPU peak", f"{line['mfu']:.1%}" if line.get("mfu") is not None else ""),
        ("GPU memory", size(line["memory_peak"]) if line.get("memory_peak") else ""),
        ("slowest worker", "{rank} on {host}: {seconds:.3f} s per step on its own".format(**slow) if slow else ""),
        ("trained for", spent(line["seconds"], line.get("gpu_hours") or 0.0, line.get("cost") or 0.0)),
    ]
    return [(name, value) for name, value in rows if value]


def _checkpoint_lines(c: Checkpoint, *, alone: bool = True) -> list[str]:
    lines = [c.uri, f"checkpoint, written {c.created} by {counted(c.workers, 'worker')}, sdp {c.sdp}, {size(c.bytes)}"]
    rows_in_epoch = f" of {c.epoch_rows:,} rows" if c.epoch_rows else ""
    done = f", {c.epoch_done:.1%}{rows_in_epoch} consumed" if c.epoch_done is not None else ""
    rows = [
        ("step", f"{c.step:,}" + (f" ({c.skipped:,} skipped)" if c.skipped else "")),
        ("samples", f"{c.samples:,}"),
        ("epoch", f"{c.epoch}{done}"),
        ("in the ledger", _epochs(c.consumed)),
        ("loss, smoothed", _number(c.loss)),
        ("trained for", spent(c.seconds, c.gpu_hours, c.cost)),
    ]
    lines += ["", table(rows)]
    stored = [(kind, f"{s['tensors']:,}", f"{s['values']:,}", size(s["bytes"])) for kind, s in c.sizes.items()]
    if stored:
        lines += ["", table(stored, ("stored", "tensors", "values", "size"))]
    model = c.model.get("source", "unknown")
    lines += ["", f"model {model}" + (f", digest {c.model['digest'][:12]}…" if c.model.get("digest") else "")]
    if c.begun_from:
        lines.append(f"started from the weights of {c.begun_from}")
    if c.lineage:
        lines.append("trained on " + " ← ".join(c.lineage))
    if alone:
        lines += ["", f"run {c.run}", *_history_lines(c.history, c.trouble)]
    changed = [(path, json.dumps(value)) for path, value in c.changed.items()]
    return [*lines, "", table(changed, ("configuration", "differs from the default"))]


def _epochs(consumed: Mapping[int, int]) -> str:
    """Return the rows of each epoch (`epochs 0-27: 872 rows each, epoch 28: 384 rows`), at most the last few spans."""
    spans = []
    for (rows, _), span in groupby(enumerate(sorted(consumed.items())), lambda at: (at[1][1], at[1][0] - at[0])):
        epochs = [epoch for _, (epoch, _) in span]
        first, last = epochs[0], epochs[-1]
        name, suffix = (f"epoch {first}", "") if first == last else (f"epochs {first}-{last}", " each")
        spans.append(f"{name}: {counted(rows, 'row')}{suffix}")
    omitted = f"{counted(len(consumed), 'epoch')}, the last of them " if len(spans) > _SPANS else ""
    return omitted + ", ".join(spans[-_SPANS:]) or "nothing"


def _history_lines(history: Mapping[str, int], trouble: Sequence[str]) -> list[str]:
    counts = ", ".join(f"{count:,} × {event}" for event, count in history.items()) or "none"
    lines = [f"events: {counts}", *(f"  {line[:300]}" for line in trouble[-_SHOWN:])]
    if len(trouble) > _SHOWN:
        lines.insert(1, f"  ({len(trouble) - _SHOWN} earlier ones)")
    return lines


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.4f}"
