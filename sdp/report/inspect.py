"""The descriptions that `sdp inspect` prints: of training runs and checkpoints here, of datasets in sdp.datasets.

Needs neither torch nor Ray. `sdp report` draws its section of a run from the same description.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, ClassVar

from sdp import lease
from sdp.config import JOBS
from sdp.config.base import changed
from sdp.console import counted, size, spent, table
from sdp.datasets import tombstones
from sdp.datasets.inspect import Description
from sdp.datasets.inspect import describe as describe_dataset
from sdp.datasets.inspect import summary as dataset_summary
from sdp.datasets.manifest import MANIFEST, open_dataset
from sdp.datasets.output import read_json
from sdp.datasets.records import reading
from sdp.errors import DatasetError, ModelError, NotFound, SdpError
from sdp.evaluate.layout import RESULT
from sdp.model.checkpoints import (
    COMPLETE,
    CONFIG,
    EMA,
    MODEL,
    checkpoint_name,
    read_ledger,
    read_marker,
)
from sdp.model.damage import DamagedCheckpoint
from sdp.model.tensor_index import read_tensor_index
from sdp.report.subject import identify, phases_of
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.train.run_folder import RunFolder
from sdp.train.timeline import SUMMARY

TROUBLE = ("recovered", "gave_up", "bad_step")
"""Events that a reader looks for first."""
_SHOWN, _SPANS = 10, 4
_HINT = "take another checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """The description of a complete checkpoint."""

    kind: ClassVar = "checkpoint"
    uri: str
    run: str
    step: int
    samples: int
    skipped: int
    """Steps that were bad and not taken."""
    epoch: int
    epoch_rows: int | None
    """Positions in an epoch; None for a checkpoint that does not say and whose dataset is away."""
    epoch_done: float | None
    """Share of the epoch under way that is consumed."""
    consumed: dict[int, int]
    """Rows in the ledger, by epoch."""
    loss: float | None
    seconds: float
    gpu_hours: float
    cost: float
    created: str
    sdp: str
    workers: int
    sizes: dict[str, dict[str, int]]
    """Of weights, average and optimizer: tensors, values, bytes."""
    files: int
    bytes: int
    """As stored, all files together."""
    model: dict[str, Any]
    datasets: list[dict[str, Any]]
    begun_from: str | None
    lineage: list[str]
    """What the dataset was made from, as far as it can be read."""
    config: dict[str, Any]
    changed: dict[str, Any]
    """Keys of the configuration that differ from this version's defaults."""
    history: dict[str, int]
    """Events of the run up to this checkpoint, by kind."""
    trouble: list[str]
    """Failures and recoveries up to it."""
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Run:
    """The description of a run of one phase or two."""

    kind: ClassVar = "run"
    uri: str
    state: str
    """One sentence: under way, ended and why, given up, or left off."""
    step: int | None
    """The newest that is known: metrics have a line every few steps, checkpoints may be newer."""
    last: dict[str, Any]
    """The newest line of the metrics."""
    checkpoints: list[dict[str, Any]]
    """Complete ones, from the newest."""
    incomplete: list[int]
    """Steps with files but no marker: being written, or left over."""
    bytes: int
    history: dict[str, int]
    trouble: list[str]
    bad_rows: dict[str, int]
    """Rows that turned out bad, by reason."""
    profile: str | None
    newest: Checkpoint | None
    phases: list["Run"] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Files of the run that are damaged."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        own = self.newest.problems if self.newest is not None else []
        return [*self.damaged, *own, *(problem for phase in self.phases for problem in phase.problems)]

    def to_json(self) -> dict[str, Any]:
        """Return all but the lines of metrics and events, which the run's own files hold."""
        plain = {name: value for name, value in vars(self).items() if name not in ("metrics", "events")}
        newest = self.newest.to_json() if self.newest is not None else None
        return {"kind": self.kind, **plain, "newest": newest, "phases": [phase.to_json() for phase in self.phases]}


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, as its file holds it."""

    kind: ClassVar = "evaluation"
    uri: str
    result: dict[str, Any]
    problems: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "uri": self.uri, **self.result}


def describe(
    storage: Storage, options: StorageOptions | None = None, *, verify: bool = False
) -> Description | Run | Checkpoint | Evaluation:
    """Describe whatever lies at an address; `verify` reads every byte of a dataset."""
    kind, storage = identify(storage, options)
    match kind:
        case "checkpoint":
            return describe_checkpoint(storage, options)
        case "run":
            return describe_run(storage, options)
        case "evaluation":
            return Evaluation(storage.uri, read_json(storage, RESULT))
        case _:
            return describe_dataset(storage, options, verify=verify)


def describe_run(storage: Storage, options: StorageOptions | None = None) -> Run:
    """Describe a run, and its phases if it has them."""
    if phases := [describe_run(phase, options) for phase in phases_of(storage)]:
        # Both belong to the same job: its state is that of the phase that it is in.
        at, whole = phases[-1], sum(phase.bytes for phase in phases)
        return Run(storage.uri, at.state, at.step, at.last, [], [], whole, {}, [], {}, None, None, phases)
    run = RunFolder(storage)
    history, steps = run.history(), run.steps()
    events, metrics = history.events, history.metrics
    complete = [step for step, whole in steps.items() if whole]
    bad_rows, problems = run.bad_reasons()
    problems = [*history.problems, *problems]
    checkpoints = [short for step in reversed(complete) if (short := _short(storage, step, problems)) is not None]
    newest = None
    if complete and [short["step"] for short in checkpoints[:1]] == complete[-1:]:
        try:
            newest = describe_checkpoint(storage.child(checkpoint_name(complete[-1])), options)
        except DatasetError as error:
            problems.append(str(error))
    return Run(
        uri=storage.uri,
        state=_state(storage, events),
        step=max([*complete[-1:], *(line["step"] for line in metrics[-1:])], default=None),
        last=metrics[-1] if metrics else {},
        checkpoints=checkpoints,
        incomplete=[step for step, whole in steps.items() if not whole],
        bytes=sum(file.size for file in storage.list()),
        history=dict(Counter(event["event"] for event in events)),
        trouble=_trouble(events),
        bad_rows=bad_rows,
        profile=storage.uri_of(SUMMARY) if storage.exists(SUMMARY) else None,
        newest=newest,
        damaged=problems,
        metrics=metrics,
        events=events,
    )


def describe_checkpoint(folder: Storage, options: StorageOptions | None = None) -> Checkpoint:
    """Describe a complete checkpoint."""
    with reading(folder.uri_of(COMPLETE), _HINT):
        return _described(folder, options)


def _described(folder: Storage, options: StorageOptions | None) -> Checkpoint:
    marker = read_marker(folder)
    state, config = marker["state"], _config(folder)
    run = open_storage(folder.uri.rpartition("/checkpoints/")[0] or folder.uri, options)
    datasets = [*marker.get("datasets", []), *([marker["dataset"]] if "dataset" in marker else [])]
    events = [event for event in RunFolder(run).events() if event["time"] <= marker["created"]]
    stored = folder.list()
    sizes, problems = _sizes(folder, {file.path: file.size for file in stored})
    samples = state["samples"] + state.get("skipped_samples", 0)
    consumed = _consumed(folder, samples, problems)
    rows = marker.get("epoch_rows")
    return Checkpoint(
        uri=folder.uri,
        run=run.uri,
        step=state["step"],
        samples=state["samples"],
        skipped=state["step"] - state["taken"] - state.get("empty", 0),
        epoch=state["epoch"],
        epoch_rows=rows,
        epoch_done=min(1.0, state["position"] / rows) if rows else None,
        consumed=consumed,
        loss=state["loss"],
        seconds=state["seconds"],
        gpu_hours=state.get("gpu_hours", 0.0),
        cost=state.get("cost", 0.0),
        created=marker["created"],
        sdp=marker["sdp"],
        workers=marker["workers"],
        sizes=sizes,
        files=len(stored),
        bytes=sum(file.size for file in stored),
        model=dict(marker.get("model", {})),
        datasets=datasets,
        begun_from=(config.get("model") or {}).get("start_from"),
        lineage=[line for dataset in datasets for line in _lineage(dataset, options)],
        config=config,
        changed=changed(JOBS["train"], config),
        history=dict(Counter(event["event"] for event in events)),
        trouble=_trouble(events),
        problems=problems,
    )


# --- pieces ----------------------------------------------------------------------------------------------------------


def _state(run: Storage, events: Sequence[Mapping[str, Any]]) -> str:
    last = events[-1] if events else {}
    if last.get("event") == "end":
        return f"ended: {last['reason']}"
    if last.get("event") == "gave_up":
        return f"given up: {'; '.join(map(str, last.get('failures', [])[-1:])) or 'no reason was told'}"
    return f"not ended; {lease.describe(run)}"


def _trouble(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for event in events if event["event"] in TROUBLE for line in _line_of(event)]


def _line_of(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield a failure or recovery as a line."""
    match event["event"]:
        case "recovered":
            failures = event.get("failures", [])
            cause = f", after {failures[-1]}" if failures else ""
            yield f"{event['time']} recovered from step {event.get('from_step', '?')}{cause}"
        case "gave_up":
            yield f"{event['time']} gave up: {'; '.join(map(str, event.get('failures', [])[-1:]))}"
        case "bad_step":
            yield f"{event['time']} a step was skipped ({event['verdict']}): {event.get('rows', '?')}"


def _short(run: Storage, step: int, problems: list[str]) -> dict[str, Any] | None:
    folder = run.child(checkpoint_name(step))
    try:
        with reading(folder.uri_of(COMPLETE), _HINT):
            marker = read_marker(folder)
            state = {name: marker["state"][name] for name in ("samples", "epoch", "loss")}
            return {"step": step, **state, "bytes": int(marker["bytes"]), "created": marker["created"]}
    except DatasetError as error:
        problems.append(str(error))
        return None


def _config(folder: Storage) -> dict[str, Any]:
    try:
        return read_json(folder, CONFIG)
    except NotFound as error:
        raise DatasetError(f"{folder.uri}: no {CONFIG} in it; take another checkpoint") from error


def _sizes(folder: Storage, stored: Mapping[str, int]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return what is stored of each kind, and the files that are missing or too short."""
    try:
        index = read_tensor_index(folder)
    except ModelError as error:
        return {}, [str(error)]
    sizes: dict[str, dict[str, int]] = {}
    for name, tensor in index.tensors.items():
        kind = "weights" if name.startswith(MODEL) else "average" if name.startswith(EMA) else "optimizer"
        total = sizes.setdefault(kind, {"tensors": 0, "values": 0, "bytes": 0})
        total["tensors"] += 1
        total["values"] += tensor.bytes // tensor.itemsize
        total["bytes"] += tensor.bytes
    return sizes, [
        f"{folder.uri_of(file)}: {stored.get(file, 0):,} bytes, where {count:,} are needed; {_HINT}"
        for file, count in sorted(index.file_sizes().items())
        if stored.get(file, 0) < count
    ]


def _consumed(folder: Storage, samples: int, problems: list[str]) -> dict[int, int]:
    """Return the rows in the ledger by epoch, which must come to the samples that were counted."""
    try:
        ledger = read_ledger(folder)
    except DamagedCheckpoint as error:
        problems.append(str(error))
        return {}
    consumed = {epoch: ledger.consumed(epoch) for epoch in ledger.epochs()}
    if (rows := sum(consumed.values())) != samples:
        problems.append(f"{folder.uri}: {samples:,} samples were counted and {rows:,} rows are in its ledger; {_HINT}")
    return consumed


def _lineage(dataset: Mapping[str, Any], options: StorageOptions | None) -> Iterator[str]:
    """Yield a dataset, whether it is still the one that was trained on, and what it was made from."""
    storage = open_storage(dataset["uri"], options)
    try:
        if not storage.exists(MANIFEST):
            yield f"{storage.uri} (not there any more)"
            return
        same = open_dataset(storage).digest == dataset.get("manifest_digest")
        yield storage.uri if same else f"{storage.uri} (its manifest is another one since)"
        yield from (one.uri for one in tombstones.lineage(storage, options)[1:])
    except SdpError as error:  # of another account, or away: the checkpoint is described without it
        yield f"{storage.uri} (cannot be read: {error})"


# --- for people ------------------------------------------------------------------------------------------------------


def summary(description: Description | Run | Checkpoint | Evaluation) -> str:
    """Return a description as a person reads it."""
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
            lines.append(f"and {len(run.checkpoints) - _SHOWN} older ones")
    if run.incomplete:
        lines.append(f"not complete: {', '.join(f'step {step}' for step in run.incomplete)}")
    lines += ["", *_history_lines(run.history, run.trouble)]
    if run.bad_rows:
        lines += ["", table([(reason, f"{n:,}") for reason, n in run.bad_rows.items()], ("bad rows", "count"))]
    if run.profile:
        lines += ["", f"profile: {run.profile}"]
    if run.newest is not None:
        lines += ["", "the newest checkpoint:", *_checkpoint_lines(run.newest, alone=False)]
    return lines


def _last(line: Mapping[str, Any], step: int | None) -> list[tuple[str, str]]:
    older = step is not None and step > line["step"]
    rows = [
        ("step", f"{step:,}; what follows is of step {line['step']:,}" if older else f"{line['step']:,}"),
        ("samples", f"{line['samples']:,}"),
        ("epoch", f"{line['epoch']}, {line['epoch_done']:.1%} done"),
        ("loss, smoothed", _number(line.get("loss_smoothed"))),
        ("img/s", f"{line['samples_per_s']:,.1f} over {counted(line['workers'], 'worker')}"),
    ]
    if line.get("mfu") is not None:
        rows.append(("of peak", f"{line['mfu']:.1%}"))
    if line.get("memory_peak"):
        rows.append(("GPU memory", size(line["memory_peak"])))
    if slow := line.get("slowest"):
        rows.append(("slowest worker", f"{slow['rank']} on {slow['host']}: {slow['seconds']:.3f} s a step on its own"))
    rows.append(("trained for", spent(line["seconds"], line.get("gpu_hours") or 0.0, line.get("cost") or 0.0)))
    return rows


def _checkpoint_lines(c: Checkpoint, *, alone: bool = True) -> list[str]:
    lines = [c.uri, f"checkpoint, written {c.created} by {counted(c.workers, 'worker')}, sdp {c.sdp}, {size(c.bytes)}"]
    of = f" of {counted(c.epoch_rows, 'row')}" if c.epoch_rows else ""
    done = f", {c.epoch_done:.1%}{of} consumed" if c.epoch_done is not None else ""
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
        lines.append(f"begun with the weights of {c.begun_from}")
    if c.lineage:
        lines.append("trained on " + " ← ".join(c.lineage))
    if alone:
        lines += ["", f"of the run {c.run}", *_history_lines(c.history, c.trouble)]
    changed = [(path, json.dumps(value)) for path, value in c.changed.items()]
    return [*lines, "", table(changed, ("configuration", "other than the default"))]


def _epochs(consumed: Mapping[int, int]) -> str:
    """`epochs 0-27: 872 rows each, epoch 28: 384 rows`, and only the last of many such spans."""
    spans = []
    for (rows, _), span in groupby(enumerate(sorted(consumed.items())), lambda at: (at[1][1], at[1][0] - at[0])):
        epochs = [epoch for _, (epoch, _) in span]
        first, last = epochs[0], epochs[-1]
        name, each = (f"epoch {first}", "") if first == last else (f"epochs {first}-{last}", " each")
        spans.append(f"{name}: {counted(rows, 'row')}{each}")
    left = f"{counted(len(consumed), 'epoch')}, the last of them " if len(spans) > _SPANS else ""
    return left + ", ".join(spans[-_SPANS:]) or "nothing"


def _history_lines(history: Mapping[str, int], trouble: Sequence[str]) -> list[str]:
    counts = ", ".join(f"{count:,} × {event}" for event, count in history.items()) or "none"
    lines = [f"events: {counts}", *(f"  {line[:300]}" for line in trouble[-_SHOWN:])]
    if len(trouble) > _SHOWN:
        lines.insert(1, f"  ({len(trouble) - _SHOWN} before these)")
    return lines


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.4f}"
