"""Audit: what became of one image, in every dataset of a lineage and in every checkpoint of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sdp.datasets import ledger as ledgers
from sdp.datasets import repeated, tombstones
from sdp.datasets.ledger import Ledger, address_offset
from sdp.datasets.manifest import part_infos
from sdp.datasets.output import read_head, read_json, read_output
from sdp.datasets.parts import PartInfo, read_account, read_rows, resolve
from sdp.datasets.tombstones import Takedown
from sdp.errors import DatasetError, NotFound, UserError
from sdp.storage import Storage, StorageOptions, open_storage

RUN = "_run.json"
CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True)
class Trace:
    """What is known of one address."""

    row: int
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """For each dataset of the lineage: uri, kind, outcome, reason, detail, attempts."""
    taken_down: bool = False
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """For each checkpoint that has been trained on it: run, checkpoint, epochs; dataset, if several are mixed."""
    checkpoints_searched: int = 0


def audit(
    uris: Sequence[str], *, row: int | None = None, value: Takedown | None = None, options: StorageOptions | None = None
) -> list[Trace]:
    """Trace an image through datasets and runs, by its address or by its URL or content hash.

    A URI is a dataset's or a training run's; the datasets that it was made from are searched too.
    """
    if row is not None and row < 0:
        raise UserError(f"audit: --row: expected an address, 0 or more, got {row}")
    runs = [s for s in (open_storage(uri, options) for uri in uris) if s.exists(RUN)]
    datasets = _datasets(uris, runs, options)
    if row is not None:
        # Of the datasets that are named; of whichever a run has where only runs are.
        named = {uri for s in _named(uris, runs, options) for uri in _lineage(s, options)}
        found = [(row, named)]
    elif value is not None:
        found = [(row, {images.uri}) for images in _images_in(datasets, value) for row in _rows_of(images, value)]
        if not found:
            where = ", ".join(s.uri for s in _images_in(datasets, value))
            raise DatasetError(f"audit: no image with {value.kind} {value.value} in {where}; check the value")
    else:
        raise UserError("audit: expected --row, --url or --sha256, got none; say which image")
    return [_trace(row, of, datasets, runs, options) for row, of in found]


def _trace(
    row: int, of: set[str], datasets: Sequence[Storage], runs: Sequence[Storage], options: StorageOptions | None
) -> Trace:
    """An address of some datasets (of all of them, if none is said), and of those that they were made from."""
    same = [s for s in datasets if not of or of & _lineage(s, options)]
    found = [record for s in same if (record := outcome_of(s, row)) is not None]
    taken = any(row in tombstones.load(s, options).rows for s in same)
    checkpoints, searched = [], 0
    for run in runs:
        sources = _sources(run, options)
        for name, ledger in checkpoint_ledgers(run):
            searched += 1
            for number, (uri, lineage) in enumerate(sources or [("", of)]):
                epochs = ledger.epochs_of(row + address_offset(number)) if not of or of & lineage else []
                if epochs:
                    which = {"dataset": uri} if len(sources) > 1 else {}
                    checkpoints.append({"run": run.uri, "checkpoint": name, "epochs": epochs, **which})
    return Trace(row, found, taken, checkpoints, searched)


def _sources(run: Storage, options: StorageOptions | None) -> list[tuple[str, set[str]]]:
    """The datasets of a run in the order of their address ranges, each with all that it was made from."""
    uris = read_json(run, RUN).get("datasets", [])
    plain = set(_plain(run, uris))
    return [(uri, {uri} if uri in plain else _lineage(open_storage(uri, options), options)) for uri in uris]


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
    if trace.checkpoints_searched:
        lines.append(f"  in {len(trace.checkpoints)} of {trace.checkpoints_searched} checkpoints")
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
    unit = int(output.index.units.of_rows(pa.array([row]).to_numpy())[0])
    attempts = sorted(attempt for number, attempt in output.done() if number == unit)
    if not attempts:
        return None
    works = {w.attempt: w for w in output.index.works() if w.unit.number == unit}
    account = resolve([read_account(storage, works[attempt].name) for attempt in attempts])
    if (again := repeated.of_storage(storage)) is not None:
        account = again.overlay(account)
    records = account.filter(pc.field("row") == row).drop_columns(["row"]).to_pylist()
    return {"uri": storage.uri, "kind": output.head.kind, **records[0]} if records else None


def checkpoint_ledgers(run: Storage) -> list[tuple[str, Ledger]]:
    """The ledger of every checkpoint of a run, by the checkpoint's name."""
    names = [n for n in run.names(CHECKPOINTS) if n.endswith("/" + ledgers.NAME)]
    return [(n.split("/")[1], Ledger.from_bytes(run.read(n), run.uri_of(n))) for n in names]


def _named(uris: Sequence[str], runs: Sequence[Storage], options: StorageOptions | None) -> list[Storage]:
    """What is not a run."""
    of_runs = {run.uri for run in runs}
    return [s for s in (open_storage(uri, options) for uri in uris) if s.uri not in of_runs]


def _datasets(uris: Sequence[str], runs: Sequence[Storage], options: StorageOptions | None) -> list[Storage]:
    """The named datasets, the runs' datasets, and all that they were made from, each once."""
    named = _named(uris, runs, options)
    for run in runs:
        of_run = read_json(run, RUN).get("datasets", [])
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


def _rows_of(images: Storage, value: Takedown) -> list[int]:
    """The addresses that have a URL or a content hash in an images dataset."""
    return sorted({row for part in part_infos(images) for row in _matching(images, part, value)})


def _matching(storage: Storage, part: PartInfo, value: Takedown) -> list[int]:
    table = read_rows(storage, part.path, ["row", value.kind])
    return [int(r) for r in table.filter(pc.field(value.kind) == value.value)["row"].to_pylist()]
