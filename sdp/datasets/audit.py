"""Audit: what became of one image, in every dataset of a lineage and in every checkpoint of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sdp.datasets import ledger as ledgers
from sdp.datasets import tombstones
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.ledger import Ledger, address_offset
from sdp.datasets.lookup import Wanted, in_parts, in_source
from sdp.datasets.manifest import part_infos, repeated_rows
from sdp.datasets.output import parts_in, read_head, read_json, read_output
from sdp.datasets.parts import read_account, resolve
from sdp.datasets.records import BadRecord, parse
from sdp.datasets.tombstones import Takedown, Tombstones
from sdp.datasets.units import part_name
from sdp.errors import DatasetError, NotFound, SdpError, UserError
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage.uri import resolved

RUN = "_run.json"
CHECKPOINTS = "checkpoints/"
BAD_STEPS = "bad_steps/"


@dataclass(frozen=True)
class Trace:
    """What is known of one address."""

    row: int
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """For each dataset of the lineage: uri, kind, outcome, reason, detail, attempts."""
    taken_down: bool = False
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """For each checkpoint that has been trained on it: run, checkpoint, epochs; dataset, if several are mixed."""
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """For each step that had it and was not taken, as its loss was bad: run, step, epochs (and dataset)."""
    checkpoints_searched: int = 0
    notes: list[str] = field(default_factory=list)
    """What could not be searched."""


_HASHED = ("tombstone", "blocked_content")
"""Reasons whose detail is the hash of the content."""


def audit(
    uris: Sequence[str], *, row: int | None = None, value: Takedown | None = None, options: StorageOptions | None = None
) -> list[Trace]:
    """Trace an image through datasets and runs, by its address or by its URL or content hash.

    A URI is a dataset's or a training run's; the datasets that it was made from are searched too.
    """
    if value is not None:
        hint = "give it as it stands in the source" if value.kind == "url" else "give the hash of the downloaded bytes"
        value = tombstones.takedown(value.kind, value.value, f"audit: --{value.kind}", hint)
    if row is not None and row < 0:
        raise UserError(f"audit: --row: expected an address, 0 or more, got {row}")
    runs = [s for s in (open_storage(uri, options) for uri in uris) if s.exists(RUN)]
    datasets = _datasets(uris, runs, options)
    if row is not None:
        # Of the datasets that are named; of whichever a run has where only runs are.
        named = {uri for s in _named(uris, runs, options) for uri in _lineage(s, options)}
        found, notes = [(row, named)], list[str]()
    elif value is not None:
        found, notes = _with_value(_images_in(datasets, value), value, options)
    else:
        raise UserError("audit: expected --row, --url or --sha256, got none; say which image")
    held = cache(lambda storage: tombstones.load(storage, options))
    return [_trace(row, of, datasets, runs, options, held, value, notes) for row, of in found]


def _trace(
    row: int,
    of: set[str],
    datasets: Sequence[Storage],
    runs: Sequence[Storage],
    options: StorageOptions | None,
    held: Callable[[Storage], Tombstones],
    value: Takedown | None,
    notes: list[str],
) -> Trace:
    """An address of some datasets (of all of them, if none is said), and of those that they were made from."""
    same = [s for s in datasets if not of or of & _lineage(s, options)]
    found = [record for s in same if (record := outcome_of(s, row)) is not None]
    taken = any(row in held(s).rows or value in held(s).takedowns for s in same)
    checkpoints, skipped, searched = list[dict[str, Any]](), list[dict[str, Any]](), 0
    for run in runs:
        sources, bad = _sources(run, options), bad_steps(run)
        numbered = [
            (row + address_offset(number), {"dataset": uri} if len(sources) > 1 else {})
            for number, (uri, lineage) in enumerate(sources or [("", of)])
            if not of or of & lineage
        ]
        for address, which in numbered:
            for step, epochs_of in bad.items():
                if epochs := sorted(epoch for epoch, rows in epochs_of.items() if address in rows):
                    skipped.append({"run": run.uri, "step": step, "epochs": epochs, **which})
        for name, ledger in checkpoint_ledgers(run):
            searched += 1
            for address, which in numbered:
                without = _skipped_before(bad, step_of(name), address)
                if epochs := [epoch for epoch in ledger.epochs_of(address) if epoch not in without]:
                    checkpoints.append({"run": run.uri, "checkpoint": name, "epochs": epochs, **which})
    return Trace(row, found, taken, checkpoints, skipped, searched, notes)


def _skipped_before(bad: Mapping[int, Mapping[int, set[int]]], step: int, address: int) -> set[int]:
    """The epochs in which an address was in a step up to this one that was not taken."""
    return {epoch for at, epochs in bad.items() if at <= step for epoch, rows in epochs.items() if address in rows}


def _sources(run: Storage, options: StorageOptions | None) -> list[tuple[str, set[str]]]:
    """The datasets of a run in the order of their address ranges, each with all that it was made from."""
    uris = datasets_of(run)
    plain = set(_plain(run, uris))
    return [(uri, {uri} if uri in plain else _lineage(open_storage(uri, options), options)) for uri in uris]


@dataclass(frozen=True, slots=True)
class _RunHead:
    datasets: tuple[str, ...] = ()


def datasets_of(run: Storage) -> list[str]:
    """The URIs of what a run is trained on, the first of them first."""
    try:
        return [resolved(uri, run.uri) for uri in parse(_RunHead, read_json(run, RUN)).datasets]
    except BadRecord as error:
        raise DatasetError(f"{run.uri_of(RUN)}: {error}; restore it from a backup") from error


def _plain(run: Storage, uris: Sequence[str]) -> list[str]:
    """Those that are plain files, of which the run keeps a list; there is nothing else to know of their rows."""
    return [uri for number, uri in enumerate(uris) if run.exists(f"_source/{number:03d}.parquet")]


def _lineage(dataset: Storage, options: StorageOptions | None) -> set[str]:
    return {ancestor.uri for ancestor in tombstones.lineage(dataset, options)}


def summary(trace: Trace) -> str:
    """A trace as a person reads it."""
    lines = [f"row {trace.row}{', taken down' if trace.taken_down else ''}"]
    for found in trace.datasets:
        why = " ".join(str(found[name]) for name in ("reason", "detail") if found[name])
        lines.append(f"  {found['kind']} {found['uri']}: {found['outcome']}{f' ({why})' if why else ''}")
    if not trace.datasets:
        lines.append("  no dataset here has an account of it")
    for found in trace.checkpoints:
        of = f" (of {found['dataset']})" if "dataset" in found else ""
        lines.append(f"  {found['run']}: trained on by {found['checkpoint']}, in {_epochs(found['epochs'])}{of}")
    for found in trace.skipped:
        of = f" (of {found['dataset']})" if "dataset" in found else ""
        step = f"step {found['step']:,}, which was skipped, in {_epochs(found['epochs'])}{of}"
        lines.append(f"  {found['run']}: consumed, and not trained on, by {step}")
    if trace.checkpoints_searched:
        lines.append(f"  in {len(trace.checkpoints)} of {trace.checkpoints_searched} checkpoints")
    lines += [f"  {note}" for note in trace.notes]
    return "\n".join(lines)


def _epochs(numbers: Sequence[int]) -> str:
    """`epoch 3`, `epochs 0-4, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"epoch{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


def outcome_of(storage: Storage, row: int) -> dict[str, Any] | None:
    """What a dataset's account says of an address; None if it has none there."""
    output = read_output(storage)
    if not output.index.units.start <= row < output.index.units.stop:
        return None
    unit, done = int(output.index.units.of_rows(np.array([row]))[0]), output.done()
    # By what was ordered: whatever else lies there under a part's name says nothing.
    works = [w for w in output.index.works() if w.unit.number == unit and (unit, w.attempt) in done]
    if not works:
        return None
    account = resolve([read_account(storage, work.name) for work in sorted(works)])
    if (again := repeated_rows(storage)) is not None:
        account = again.overlay(account)
    records = account.filter(pc.field("row") == row).drop_columns(["row"]).to_pylist()
    return {"uri": storage.uri, "kind": output.head.kind, **records[0]} if records else None


def checkpoint_ledgers(run: Storage) -> list[tuple[str, Ledger]]:
    """The ledger of every checkpoint of a run, by the checkpoint's name."""
    names = [n for n in run.names(CHECKPOINTS) if n.endswith("/" + ledgers.NAME)]
    return [(n.split("/")[1], Ledger.from_bytes(run.read(n), run.uri_of(n))) for n in names]


def bad_steps(run: Storage) -> dict[int, dict[int, set[int]]]:
    """The rows of each step that was not taken, by the epoch to which they belong."""
    names = [name for name in run.names(BAD_STEPS) if name.endswith(".json")]
    return dict(ordered_map(lambda name: (step_of(name), _bad_step(run, name)), names, workers=8))


def _bad_step(run: Storage, name: str) -> dict[int, set[int]]:
    told = read_json(run, name).get("epochs", {})
    try:
        return {int(epoch): set(map(int, rows)) for epoch, rows in told.items()}
    except (AttributeError, TypeError, ValueError) as error:
        what = "its rows cannot be told; restore it from a backup, or delete it to have them count as trained on"
        raise DatasetError(f"{run.uri_of(name)}: damaged ({error}): {what}") from error


def step_of(name: str) -> int:
    """The step in the name of what belongs to one."""
    digits = name.removesuffix(".json").rpartition("step-")[2]
    return int(digits) if digits.isdigit() else -1


def _named(uris: Sequence[str], runs: Sequence[Storage], options: StorageOptions | None) -> list[Storage]:
    """What is not a run."""
    of_runs = {run.uri for run in runs}
    return [s for s in (open_storage(uri, options) for uri in uris) if s.uri not in of_runs]


def _datasets(uris: Sequence[str], runs: Sequence[Storage], options: StorageOptions | None) -> list[Storage]:
    """The named datasets, the runs' datasets, and all that they were made from, each once."""
    named = _named(uris, runs, options)
    for run in runs:
        of_run = datasets_of(run)
        plain = set(_plain(run, of_run))
        named += [open_storage(uri, options) for uri in of_run if uri not in plain]
    found: dict[str, Storage] = {}
    for dataset in named:
        try:
            read_head(dataset)
        except NotFound as error:
            raise DatasetError(
                f"{dataset.uri}: neither a dataset of sdp nor a training run; check the address"
            ) from error
        for ancestor in tombstones.lineage(dataset, options):
            found.setdefault(ancestor.uri, ancestor)
    return list(found.values())


def _images_in(datasets: Sequence[Storage], value: Takedown) -> list[Storage]:
    images = [s for s in datasets if read_head(s).kind == "images"]
    if not images:
        raise DatasetError(f"audit: no images dataset in this lineage, so no {value.kind} is known; give --row instead")
    return images


def _with_value(
    images: Sequence[Storage], value: Takedown, options: StorageOptions | None
) -> tuple[list[tuple[int, set[str]]], list[str]]:
    """The addresses that have a URL or a content hash, whatever became of them; and what could not be searched."""
    found, notes = list[tuple[int, set[str]]](), list[str]()
    for storage in images:
        rows = {row for _, _, row in in_parts(storage, _ordered_parts(storage), _wanted(value))}
        if value.kind == "sha256":
            rows |= set(_refused_content(storage, value.value))
        else:
            try:
                rows |= _rows_of_source(storage, value.value, options)
            except SdpError as error:
                notes.append(f"only what was written is searched, not the source of {storage.uri}: {error}")
        found += [(row, {storage.uri}) for row in sorted(rows)]
    if not found:
        where = ", ".join(s.uri for s in images)
        lines = "".join(f"\n{note}" for note in notes)
        raise DatasetError(f"audit: no image with {value.kind} {value.value} in {where}; check the value{lines}")
    return found, notes


def _wanted(value: Takedown) -> Wanted:
    only = frozenset({value.value})
    return Wanted(urls=only) if value.kind == "url" else Wanted(hashes=only)


def _ordered_parts(storage: Storage) -> list[str]:
    return [part_name(*part) for part in sorted(parts_in(storage) & read_output(storage).index.ordered().keys())]


def _rows_of_source(images: Storage, url: str, options: StorageOptions | None) -> set[int]:
    """The addresses that have a URL in the table that the images were made from."""
    output = read_output(images)
    column = output.head.identity.get("source.url_column")
    if not isinstance(column, str):
        raise DatasetError("it does not say which column holds URLs")
    return {row for _, _, row in in_source(output.index, column, frozenset({url}), options)}


def _refused_content(images: Storage, digest: str) -> list[int]:
    """Rows that were fetched and left out for their content, of which the account has the hash."""
    parts = [p.path for p in part_infos(images) if any(reason in p.counts.reasons for reason in _HASHED)]

    def look(path: str) -> list[int]:
        account = read_account(images, path)
        mask = pc.and_(pc.is_in(account["reason"], pa.array(_HASHED)), pc.equal(account["detail"], digest))
        rows: list[int] = account.filter(mask)["row"].to_pylist()
        return rows

    return [row for rows in ordered_map(look, parts, workers=8) for row in rows]
