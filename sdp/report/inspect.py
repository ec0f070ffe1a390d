"""What `sdp inspect` says of a training run and of a checkpoint. Needs neither torch nor Ray."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from sdp.console import duration, size, table
from sdp.datasets import tombstones
from sdp.datasets.audit import RUN
from sdp.datasets.ledger import NAME as LEDGER
from sdp.datasets.ledger import Ledger
from sdp.datasets.manifest import MANIFEST, open_dataset
from sdp.datasets.output import read_json
from sdp.errors import DatasetError, NotFound, SdpError
from sdp.lease import FOLDER as LEASES
from sdp.lease import Record
from sdp.model.checkpoints import COMPLETE, CONFIG, EMA, MODEL, checkpoint_name, find_checkpoint, read_marker, steps_in
from sdp.report.damage import understood
from sdp.report.history import EVENTS, is_event, read_history, read_lines
from sdp.report.profile import SUMMARY
from sdp.report.run import PHASES
from sdp.storage import Storage, StorageOptions

_INDEX = "tensors.json"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
_CHECKPOINT = re.compile(r"/checkpoints/step-\d+$")
_LATEST = re.compile(r"/checkpoints(/latest)?$")
_TROUBLE = ("recovered", "gave_up", "bad_step")
_SHOWN = 10


@dataclass(frozen=True)
class Checkpoint:
    """What there is to say of a checkpoint."""

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
        return {"kind": "checkpoint", **asdict(self)}


@dataclass(frozen=True)
class Run:
    """What there is to say of a run."""

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
    """Files of the run with lines that are none."""

    @property
    def problems(self) -> list[str]:
        own = self.newest.problems if self.newest is not None else []
        return [*self.damaged, *own, *(problem for phase in self.phases for problem in phase.problems)]

    def to_json(self) -> dict[str, Any]:
        newest = self.newest.to_json() if self.newest is not None else None
        phases = [phase.to_json() for phase in self.phases]
        return {"kind": "run", **asdict(self), "newest": newest, "phases": phases}


def describe(storage: Storage, options: StorageOptions | None = None) -> Run | Checkpoint | None:
    """Describe a run (of one phase or two) or a checkpoint; None of what is neither."""
    if storage.exists(COMPLETE):
        return describe_checkpoint(storage, options)
    if storage.exists(RUN) or any(storage.child(phase).exists(RUN) for phase in PHASES):
        return describe_run(storage, options)
    if _CHECKPOINT.search(storage.uri) and storage.names():
        raise DatasetError(f"{storage.uri}: no {COMPLETE} in it: it is being written, or was left off; take another")
    if _LATEST.search(storage.uri):
        return describe_checkpoint(find_checkpoint(storage.uri, options), options)
    return None


def describe_run(storage: Storage, options: StorageOptions | None = None) -> Run:
    """A run, and its phases if it has them."""
    phases = [describe_run(one, options) for one in map(storage.child, PHASES) if one.exists(RUN)]
    if phases:
        # Both are the same job's: what is said of the whole is said of the one that it is in.
        at = phases[-1]
        whole = sum(phase.bytes for phase in phases)
        return Run(storage.uri, at.state, at.step, at.last, [], [], whole, {}, [], {}, None, None, phases)
    history = read_history(storage)
    events, metrics = history.events, history.metrics
    steps = steps_in(storage)
    complete = [step for step, whole in steps.items() if whole]
    problems = list(history.problems)
    return Run(
        uri=storage.uri,
        state=_state(storage, events),
        step=max([*complete[-1:], *(line["step"] for line in metrics[-1:])], default=None),
        last=metrics[-1] if metrics else {},
        checkpoints=[short for step in reversed(complete) if (short := _short(storage, step, problems)) is not None],
        incomplete=[step for step, whole in steps.items() if not whole],
        bytes=sum(file.size for file in storage.list()),
        history=dict(Counter(event["event"] for event in events)),
        trouble=_trouble(events),
        bad_rows=_bad_rows(storage, problems),
        profile=storage.uri_of(SUMMARY) if storage.exists(SUMMARY) else None,
        newest=_newest(storage, complete, options, problems),
        damaged=problems,
    )


def _newest(
    run: Storage, complete: Sequence[int], options: StorageOptions | None, problems: list[str]
) -> Checkpoint | None:
    if not complete:
        return None
    try:
        return describe_checkpoint(run.child(checkpoint_name(complete[-1])), options)
    except DatasetError as error:
        problems.append(str(error))
        return None


def describe_checkpoint(folder: Storage, options: StorageOptions | None = None) -> Checkpoint:
    """A complete checkpoint."""
    with understood(folder.uri_of(COMPLETE), "take another checkpoint"):
        return _described(folder, options)


def _described(folder: Storage, options: StorageOptions | None) -> Checkpoint:
    from sdp.storage import open_storage

    marker = read_marker(folder)
    state, config = marker["state"], _config(folder)
    run = open_storage(folder.uri.rpartition("/checkpoints/")[0] or folder.uri, options)
    datasets = [*marker.get("datasets", []), *([marker["dataset"]] if "dataset" in marker else [])]
    events = [event for event in read_lines(run, EVENTS, is_event)[0] if event["time"] <= marker["created"]]
    sizes, problems = _sizes(folder)
    ledger, trouble = _ledger(folder)
    consumed = {epoch: ledger.consumed(epoch) for epoch in ledger.epochs()} if ledger is not None else {}
    counted = state["samples"] + state.get("skipped_samples", 0)
    if ledger is not None and sum(consumed.values()) != counted:
        problems.append(
            f"{folder.uri}: {counted:,} samples were counted and {sum(consumed.values()):,} rows are in its "
            "ledger; take another checkpoint"
        )
    rows = marker.get("epoch_rows")
    stored = folder.list()
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
        changed=_changed(config),
        history=dict(Counter(event["event"] for event in events)),
        trouble=_trouble(events),
        problems=[*problems, *trouble],
    )


# --- pieces ----------------------------------------------------------------------------------------------------------


def _state(run: Storage, events: Sequence[Mapping[str, Any]]) -> str:
    last = events[-1] if events else {}
    if last.get("event") == "end":
        return f"ended: {last['reason']}"
    if last.get("event") == "gave_up":
        return f"given up: {'; '.join(map(str, last.get('failures', [])[-1:])) or 'no reason was told'}"
    return f"not ended; {_lease(run)}"


def _lease(run: Storage) -> str:
    """Who writes the run. The store's clock and ours may differ: this is told to people, and decides nothing."""
    files = run.list(LEASES)
    if not files:
        return "nobody holds its lease"
    record = Record.load(run.read(files[-1].path))
    age = (datetime.now(UTC) - files[-1].modified).total_seconds()
    if record is None or record.released:
        return "its lease is free: run its job again to go on"
    who = f"{record.owner.host} pid {record.owner.pid}"
    if age <= 2 * record.ttl_s:
        return f"under way: {who} holds its lease since {record.since}"
    return f"left off: {who} held its lease, last seen {duration(age)} ago; run its job again to go on"


def _trouble(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for event in events if event["event"] in _TROUBLE for line in _told(event)]


def _told(event: Mapping[str, Any]) -> Iterator[str]:
    """A failure or recovery in a line."""
    match event["event"]:
        case "recovered":
            failures = event.get("failures", [])
            cause = f", after {failures[-1]}" if failures else ""
            yield f"{event['time']} recovered from step {event.get('from_step', '?')}{cause}"
        case "gave_up":
            yield f"{event['time']} gave up: {'; '.join(map(str, event.get('failures', [])[-1:]))}"
        case "bad_step":
            yield f"{event['time']} a step was skipped ({event['verdict']}): {event.get('rows', '?')}"


def _bad_rows(run: Storage, problems: list[str]) -> dict[str, int]:
    reasons: Counter[str] = Counter()
    for name in run.names("bad_rows/"):
        lines, damaged = read_lines(run, name, _is_bad_row)
        reasons.update(line["reason"] for line in lines)
        problems += damaged
    return dict(reasons.most_common())


def _is_bad_row(line: Any) -> bool:
    return isinstance(line, dict) and isinstance(line.get("reason"), str)


def _short(run: Storage, step: int, problems: list[str]) -> dict[str, Any] | None:
    folder = run.child(checkpoint_name(step))
    try:
        with understood(folder.uri_of(COMPLETE), "take another checkpoint"):
            marker = read_marker(folder)
            state = marker["state"]
            told = {name: state[name] for name in ("samples", "epoch", "loss")}
            return {"step": step, **told, "bytes": marker["bytes"], "created": marker["created"]}
    except DatasetError as error:
        problems.append(str(error))
        return None


def _config(folder: Storage) -> dict[str, Any]:
    try:
        return read_json(folder, CONFIG)
    except NotFound as error:
        raise DatasetError(f"{folder.uri}: no {CONFIG} in it; take another checkpoint") from error


def _changed(config: Mapping[str, Any]) -> dict[str, Any]:
    from sdp.config import JOBS, keys

    defaults = {key.path: _plain(key.field.get_default(call_default_factory=True)) for key in keys(JOBS["train"])}
    found: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            path = prefix + name
            if path not in defaults and isinstance(value, Mapping):
                walk(value, f"{path}.")
            elif path not in defaults or defaults[path] != value:
                found[path] = value

    walk(config, "")
    return found


def _plain(value: Any) -> Any:
    """As JSON has it, where there are no tuples."""
    return list(value) if isinstance(value, tuple) else value


def _sizes(folder: Storage) -> tuple[dict[str, dict[str, int]], list[str]]:
    """What is stored of which kind, and files that are missing or too short."""
    try:
        index = read_json(folder, _INDEX)["tensors"]
        needed: dict[str, int] = {}
        sizes: dict[str, dict[str, int]] = {}
        for name, tensor in index.items():
            each = _BYTES[tensor["dtype"]]
            kind = "weights" if name.startswith(MODEL) else "average" if name.startswith(EMA) else "optimizer"
            about = sizes.setdefault(kind, {"tensors": 0, "values": 0, "bytes": 0})
            about["tensors"] += 1
            about["values"] += math.prod(tensor["size"])
            about["bytes"] += math.prod(tensor["size"]) * each
            for _, chunk, file, start in tensor["chunks"]:
                needed[file] = max(needed.get(file, 0), start + math.prod(chunk) * each)
    except NotFound:
        return {}, [f"{folder.uri_of(_INDEX)}: missing; take another checkpoint"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {}, [f"{folder.uri_of(_INDEX)}: not an index of tensors ({error}); take another checkpoint"]
    there = {file.path: file.size for file in folder.list()}
    problems = [
        f"{folder.uri_of(file)}: {there.get(file, 0):,} bytes, where {count:,} are needed; take another checkpoint"
        for file, count in sorted(needed.items())
        if there.get(file, 0) < count
    ]
    return sizes, problems


def _ledger(folder: Storage) -> tuple[Ledger | None, list[str]]:
    try:
        return Ledger.from_bytes(folder.read(LEDGER), folder.uri_of(LEDGER)), []
    except NotFound:
        return None, [f"{folder.uri_of(LEDGER)}: missing; take another checkpoint"]
    except DatasetError as error:
        return None, [str(error)]


def _lineage(dataset: Mapping[str, Any], options: StorageOptions | None) -> Iterator[str]:
    """What a dataset was made from, and whether it is still the one that was trained on."""
    from sdp.storage import open_storage

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


def summary(description: Run | Checkpoint) -> str:
    """A description as a person reads it."""
    lines = _run_lines(description) if isinstance(description, Run) else _checkpoint_lines(description)
    if description.problems:
        lines += ["", f"{len(description.problems):,} problems:", *(f"  {problem}" for problem in description.problems)]
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
        ("img/s", f"{line['samples_per_s']:,.1f} over {_workers(line['workers'])}"),
    ]
    if line.get("mfu") is not None:
        rows.append(("of peak", f"{line['mfu']:.1%}"))
    if line.get("memory_peak"):
        rows.append(("GPU memory", size(line["memory_peak"])))
    if slow := line.get("slowest"):
        rows.append(("slowest worker", f"{slow['rank']} on {slow['host']}: {slow['seconds']:.3f} s a step on its own"))
    rows.append(("trained for", duration(line["seconds"])))
    if line.get("cost"):
        rows.append(("cost", f"{line['cost']:,.2f}"))
    return rows


def _checkpoint_lines(c: Checkpoint, *, alone: bool = True) -> list[str]:
    lines = [c.uri, f"checkpoint, written {c.created} by {_workers(c.workers)}, sdp {c.sdp}, {size(c.bytes)}"]
    of = f" of {c.epoch_rows:,} rows" if c.epoch_rows else ""
    done = f", {c.epoch_done:.1%}{of} consumed" if c.epoch_done is not None else ""
    rows = [
        ("step", f"{c.step:,}" + (f" ({c.skipped:,} skipped)" if c.skipped else "")),
        ("samples", f"{c.samples:,}"),
        ("epoch", f"{c.epoch}{done}"),
        ("in the ledger", ", ".join(f"epoch {e}: {n:,} rows" for e, n in c.consumed.items()) or "nothing"),
        ("loss, smoothed", _number(c.loss)),
        ("trained for", duration(c.seconds) + (f", cost {c.cost:,.2f}" if c.cost else "")),
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


def _history_lines(history: Mapping[str, int], trouble: Sequence[str]) -> list[str]:
    told = ", ".join(f"{count:,} × {event}" for event, count in history.items()) or "none"
    lines = [f"events: {told}", *(f"  {line[:300]}" for line in trouble[-_SHOWN:])]
    if len(trouble) > _SHOWN:
        lines.insert(1, f"  ({len(trouble) - _SHOWN} before these)")
    return lines


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.4f}"
