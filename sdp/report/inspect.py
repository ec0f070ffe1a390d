"""Descriptions of runs, checkpoints and evaluations; those of datasets are in sdp.datasets. Without torch and Ray."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from sdp import lease
from sdp.config import JOBS
from sdp.config.base import changed
from sdp.config.removed import without_removed
from sdp.config.train import PHASES
from sdp.datasets import tombstones
from sdp.datasets.audit import RUN
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.inspect import Description
from sdp.datasets.inspect import describe as describe_dataset
from sdp.datasets.manifest import MANIFEST, open_dataset
from sdp.datasets.output import HEAD, read_json
from sdp.datasets.records import reading
from sdp.errors import DatasetError, ModelError, SdpError
from sdp.evaluate.layout import RESULT
from sdp.model.checkpoints import (
    COMPLETE,
    NAMED,
    NEWEST,
    checkpoint_name,
    find_checkpoint,
    read_config,
    read_ledger,
    read_marker,
    run_of,
    state_in,
    tensor_sizes,
)
from sdp.model.tensor_index import DamagedCheckpoint, read_tensor_index
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.train.run_folder import PROFILE, RunFolder

SubjectKind = Literal["checkpoint", "run", "evaluation", "dataset"]

_MARKERS: dict[str, SubjectKind] = {COMPLETE: "checkpoint", RUN: "run", RESULT: "evaluation", HEAD: "dataset"}
_FOLDERS = 100
"""Limit on the folders that are looked at if a URI is none of these."""
TROUBLE = ("recovered", "gave_up", "bad_step")
"""Events that report a failure."""
_STATE = ("step", "samples", "skipped", "epoch", "loss", "seconds", "gpu_hours")
"""The counts of a run that the description of a checkpoint repeats."""
_HINT = "use another checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """The description of a complete checkpoint."""

    kind: ClassVar = "checkpoint"
    uri: str
    run: str
    step: int
    samples: int
    skipped: int
    """Bad steps, whose update was skipped."""
    epoch: int
    epoch_rows: int | None
    """Positions in an epoch; None if the checkpoint does not record it."""
    epoch_done: float | None
    """Consumed share of the current epoch."""
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
    """Tensors, values and bytes of the weights, the average and the optimizer."""
    files: int
    bytes: int
    """Size of all files."""
    model: dict[str, Any]
    datasets: list[dict[str, Any]]
    begun_from: str | None
    lineage: list[str]
    """The datasets and what they were made from, as far as that can be read."""
    config: dict[str, Any]
    changed: dict[str, Any]
    """Keys of the configuration that differ from this version's defaults."""
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Run:
    """The description of a run, with one phase or two."""

    kind: ClassVar = "run"
    uri: str
    state: str
    """One sentence: running, ended and why, or given up."""
    step: int | None
    """Newest known step, by metrics and checkpoints."""
    last: dict[str, Any]
    """Newest line of the metrics."""
    bytes: int
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Complete checkpoints, from the newest."""
    incomplete: list[int] = field(default_factory=list)
    """Steps with files but no marker: being written, or abandoned."""
    history: dict[str, int] = field(default_factory=dict)
    """Number of events, by kind."""
    trouble: list[dict[str, Any]] = field(default_factory=list)
    """The events that report a failure or a recovery."""
    bad_rows: dict[str, int] = field(default_factory=dict)
    """Number of rows found bad in training, by reason."""
    profile: str | None = None
    newest: Checkpoint | None = None
    phases: list["Run"] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Problems with the run's files."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All problems, including those of the newest checkpoint and the phases."""
        newest = self.newest.problems if self.newest is not None else []
        return [*self.damaged, *newest, *(problem for phase in self.phases for problem in phase.problems)]

    def to_json(self) -> dict[str, Any]:
        """Return everything except the metrics and events, which are in the run's own files."""
        plain = {name: value for name, value in vars(self).items() if name not in ("metrics", "events")}
        newest = self.newest.to_json() if self.newest is not None else None
        return {"kind": self.kind, **plain, "newest": newest, "phases": [phase.to_json() for phase in self.phases]}


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    kind: ClassVar = "evaluation"
    uri: str
    result: dict[str, Any]
    problems: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "uri": self.uri, **self.result}


Described = Description | Run | Checkpoint | Evaluation


def describe(storage: Storage, *, verify: bool = False) -> Described:
    """Describe the dataset, run, checkpoint or evaluation at a URI; `verify` reads every byte of a dataset."""
    kind, storage = identify(storage)
    match kind:
        case "checkpoint":
            return describe_checkpoint(storage)
        case "run":
            return describe_run(storage)
        case "evaluation":
            return Evaluation(storage.uri, read_json(storage, RESULT))
        case _:
            return describe_dataset(storage, verify=verify)


# --- what a URI is ---------------------------------------------------------------------------------------------------


def kind_of(storage: Storage) -> SubjectKind | None:
    """Return the kind of a folder by its marker file, or None."""
    return next(
        (kind for name, kind in _MARKERS.items() if storage.exists(name)), "run" if phases_of(storage) else None
    )


def phases_of(storage: Storage) -> list[Storage]:
    """Return the phases of a two-phase run."""
    return [phase for phase in map(storage.child, PHASES) if phase.exists(RUN)]


def identify(storage: Storage) -> tuple[SubjectKind, Storage]:
    """Return the kind and folder of a URI: `RUN/checkpoints/latest` becomes a checkpoint's folder.

    A URI with datasets below it is refused with their names.
    """
    if kind := kind_of(storage):
        return kind, storage
    if NEWEST.search(storage.uri):
        return "checkpoint", find_checkpoint(storage.uri, storage.options)
    if NAMED.search(storage.uri) and storage.names(limit=1):
        raise DatasetError(f"{storage.uri}: no {COMPLETE}: incomplete, or still being written; use another checkpoint")
    if Path(storage.uri).is_file():
        raise DatasetError(f"{storage.uri}: a file; pass the folder that contains it")
    folders = storage.folders()[:_FOLDERS]
    kinds = list(ordered_map(lambda name: kind_of(storage.child(name)), folders, workers=16))
    if below := [name for name, kind in zip(folders, kinds, strict=True) if kind]:
        raise DatasetError(f"{storage.uri}: no dataset here, but in {', '.join(below)}; pass one of these")
    raise DatasetError(f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}); check the URI")


# --- descriptions ----------------------------------------------------------------------------------------------------


def describe_run(storage: Storage) -> Run:
    """Describe a run, and its phases if it has any."""
    if phases := [describe_run(phase) for phase in phases_of(storage)]:
        # One job runs both phases, so its state is that of the last one.
        last, total = phases[-1], sum(phase.bytes for phase in phases)
        return Run(storage.uri, last.state, last.step, last.last, total, phases=phases)
    run = RunFolder(storage)
    problems = list[str]()
    metrics, events, bad_rows = run.metrics(problems), run.events(problems), run.bad_rows(problems)
    steps = run.steps()
    complete = [step for step, is_complete in steps.items() if is_complete]
    reported = [event["step"] for event in events if isinstance(event.get("step"), int)]
    checkpoints = [entry for step in reversed(complete) if (entry := _list_entry(storage, step, problems)) is not None]
    newest = None
    if complete and [entry["step"] for entry in checkpoints[:1]] == complete[-1:]:
        try:
            newest = describe_checkpoint(storage.child(checkpoint_name(complete[-1])))
        except DatasetError as error:
            problems.append(str(error))
    return Run(
        uri=storage.uri,
        state=_state(storage, events),
        step=max([*complete[-1:], *(line["step"] for line in metrics[-1:]), *reported[-1:]], default=None),
        last=metrics[-1] if metrics else {},
        checkpoints=checkpoints,
        incomplete=[step for step, is_complete in steps.items() if not is_complete],
        bytes=sum(file.size for file in storage.list()),
        history=dict(Counter(event["event"] for event in events)),
        trouble=[event for event in events if event["event"] in TROUBLE],
        bad_rows=dict(Counter(line["reason"] for line in bad_rows).most_common()),
        profile=storage.uri_of(PROFILE) if storage.exists(PROFILE) else None,
        newest=newest,
        damaged=problems,
        metrics=metrics,
        events=events,
    )


def describe_checkpoint(folder: Storage) -> Checkpoint:
    """Describe a complete checkpoint."""
    config = read_config(folder)
    with reading(folder.uri_of(COMPLETE), _HINT):
        marker = read_marker(folder)
        state = state_in(marker)
        datasets = [*marker.get("datasets", []), *([marker["dataset"]] if "dataset" in marker else [])]
        stored = folder.list()
        sizes, problems = _sizes(folder, {file.path: file.size for file in stored})
        consumed = _consumed(folder, state.consumed, problems)
        rows = marker.get("epoch_rows")
        return Checkpoint(
            uri=folder.uri,
            run=run_of(folder.uri),
            **{name: getattr(state, name) for name in _STATE},
            cost=state.cost(config.get("prices") or {}),
            **{name: marker[name] for name in ("created", "sdp", "workers")},
            epoch_rows=rows,
            epoch_done=min(1.0, state.position / rows) if rows else None,
            consumed=consumed,
            sizes=sizes,
            files=len(stored),
            bytes=sum(file.size for file in stored),
            model=dict(marker.get("model", {})),
            datasets=datasets,
            begun_from=(config.get("model") or {}).get("start_from"),
            lineage=[line for dataset in datasets for line in _lineage(dataset, folder.options)],
            config=config,
            changed=changed(JOBS["train"], without_removed("train", config)),
            problems=problems,
        )


def _state(run: Storage, events: Sequence[Mapping[str, Any]]) -> str:
    """Return a run's state in one sentence."""
    last = events[-1] if events else {}
    if last.get("event") == "end":
        return f"ended: {last['reason']}"
    if last.get("event") == "gave_up":
        return f"given up: {'; '.join(map(str, last.get('failures', [])[-1:])) or 'unknown reason'}"
    return f"not ended; {lease.describe(run)}"


def _list_entry(run: Storage, step: int, problems: list[str]) -> dict[str, Any] | None:
    """Return a checkpoint's entry in the run's list; None if it is damaged, which is added to the problems."""
    folder = run.child(checkpoint_name(step))
    try:
        with reading(folder.uri_of(COMPLETE), _HINT):
            marker = read_marker(folder)
            state = state_in(marker)
            counts = {name: getattr(state, name) for name in ("samples", "epoch", "loss")}
            return {"step": step, **counts, "bytes": int(marker["bytes"]), "created": marker["created"]}
    except DatasetError as error:
        problems.append(str(error))
        return None


def _sizes(folder: Storage, stored: Mapping[str, int]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return the size of each kind of tensors, and a problem for each file that is missing or too short."""
    try:
        index = read_tensor_index(folder)
    except ModelError as error:
        return {}, [str(error)]
    return tensor_sizes(index), [
        f"{folder.uri_of(file)}: {stored.get(file, 0):,} bytes, expected {count:,}; {_HINT}"
        for file, count in sorted(index.file_sizes().items())
        if stored.get(file, 0) < count
    ]


def _consumed(folder: Storage, samples: int, problems: list[str]) -> dict[int, int]:
    """Return the number of rows in the ledger, by epoch. Their sum must equal the counted samples."""
    try:
        ledger = read_ledger(folder)
    except DamagedCheckpoint as error:
        problems.append(str(error))
        return {}
    consumed = {epoch: ledger.consumed(epoch) for epoch in ledger.epochs()}
    if (rows := sum(consumed.values())) != samples:
        problems.append(f"{folder.uri}: {samples:,} samples counted, but {rows:,} rows in its ledger; {_HINT}")
    return consumed


def _lineage(dataset: Mapping[str, Any], options: StorageOptions) -> Iterator[str]:
    """Yield a dataset's URI, with a remark if it has changed since training, and those it was made from."""
    storage = open_storage(dataset["uri"], options)
    try:
        if not storage.exists(MANIFEST):
            yield f"{storage.uri} (no longer there)"
            return
        is_unchanged = open_dataset(storage).digest == dataset.get("manifest_digest")
        yield storage.uri if is_unchanged else f"{storage.uri} (its manifest has changed)"
        yield from (ancestor.uri for ancestor in tombstones.lineage(storage, options)[1:])
    except SdpError as error:  # no access, or unreachable: the checkpoint is described without it
        yield f"{storage.uri} (cannot be read: {error})"
