"""The audit of one image: its outcome in every dataset of a lineage, and every checkpoint whose run has consumed it.

A run has also consumed the rows of the few steps that it skipped, which its events list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sdp.console import counted
from sdp.datasets import ledger as ledgers
from sdp.datasets import tombstones
from sdp.datasets.draws import held_out
from sdp.datasets.inspect import accounts
from sdp.datasets.ledger import Ledger, address_offset
from sdp.datasets.lookup import in_parts
from sdp.datasets.names import finder
from sdp.datasets.output import parts_in, read_head, read_json, read_output
from sdp.datasets.parts import read_account
from sdp.datasets.records import parse, reading
from sdp.datasets.tombstones import Takedown
from sdp.errors import DatasetError, NotFound, UserError
from sdp.storage import Storage, open_storage
from sdp.storage.uri import resolved

RUN = "_run.json"
CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True)
class Trace:
    """The history of one address."""

    row: int
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """For each dataset of the lineage: uri, kind, part, outcome, reason, detail, attempts."""
    taken_down: bool = False
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """For each checkpoint whose run has consumed it: run, checkpoint, epochs; in a mixture also dataset."""
    unused: dict[str, str] = field(default_factory=dict)
    """The reason why a run that reads its dataset has not consumed it, by the run's URI."""
    checkpoints_searched: int = 0
    notes: list[str] = field(default_factory=list)
    """One line for each place that could not be searched."""


def audit(
    uris: Sequence[str], *, row: int | None = None, value: Takedown | None = None, file: str | None = None
) -> list[Trace]:
    """Trace an image through datasets and runs, by its address, its URL or content hash, or the name of its file.

    A URI is a dataset's or a training run's; their ancestors are searched too.
    """
    if value is not None:
        hint = "write it as in the source" if value.kind == "url" else "give the hash of the downloaded bytes"
        value = tombstones.takedown(value.kind, value.value, f"audit: --{value.kind}", hint)
    elif row is not None and row < 0:
        raise UserError(f"audit: --row: expected an address, 0 or more, got {row}")
    return _Audit(uris, row, value).traces(file)


def _spans(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text, those without a gap as `first-last`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def summary(trace: Trace) -> str:
    """Return a trace as text."""
    lines = [f"row {trace.row}{', taken down' if trace.taken_down else ''}"]
    for outcome in trace.datasets:
        why = " ".join(str(outcome[name]) for name in ("reason", "detail") if outcome[name])
        words = f"{outcome['outcome']} ({why})" if why else outcome["outcome"]
        lines.append(f"  {outcome['kind']} {outcome['uri']}: {words}, {outcome['part']}")
    if not trace.datasets:
        lines.append("  no dataset here has an account of it")
    for use in trace.checkpoints:
        dataset = f" of {use['dataset']}" if "dataset" in use else ""
        epochs = _spans(use["epochs"])
        lines.append(f"  {use['run']}: consumed before {use['checkpoint']}, in epoch {epochs}{dataset}")
    lines += [f"  {run}: {why}" for run, why in trace.unused.items()]
    if trace.checkpoints_searched:
        lines.append(f"  in {len(trace.checkpoints)} of {counted(trace.checkpoints_searched, 'checkpoint')}")
    lines += [f"  {note}" for note in trace.notes]
    return "\n".join(lines)


class _Audit:
    """One search through the datasets and runs that were named, and the ancestors of both."""

    def __init__(self, uris: Sequence[str], row: int | None, value: Takedown | None) -> None:
        storages = list(map(open_storage, uris))
        self._row, self._value = row, value
        self._runs = [storage for storage in storages if storage.exists(RUN)]
        self._named = [storage for storage in storages if storage not in self._runs]  # the datasets that were named
        self._lineage = cache(lambda dataset: {storage.uri for storage in tombstones.lineage(dataset)})
        self._takedowns = cache(tombstones.load)
        self._datasets = self._all_datasets()
        self._notes: list[str] = []

    def traces(self, file: str | None = None) -> list[Trace]:
        if file is not None:
            return [self._trace(row, {uri}) for row, uri in self._rows_of_file(file)]
        if self._row is not None:
            # The address is one of the named datasets; if only runs are named, one of any of their datasets.
            return [self._trace(self._row, {uri for dataset in self._named for uri in self._lineage(dataset)})]
        return [self._trace(row, {uri}) for row, uri in self._rows_with_value()]

    def _all_datasets(self) -> list[Storage]:
        """Return the datasets that are named or that runs train on, and the ancestors of all, each once."""
        named = list(self._named)
        for run in self._runs:
            named += map(open_storage, _written_sources(run))
        datasets: dict[str, Storage] = {}
        for dataset in named:
            try:
                read_head(dataset)
            except NotFound as error:
                raise DatasetError(
                    f"{dataset.uri}: neither a dataset of sdp nor a training run; check the URI"
                ) from error
            datasets.update((storage.uri, storage) for storage in tombstones.lineage(dataset))
        return list(datasets.values())

    def _trace(self, row: int, uris: set[str]) -> Trace:
        """Trace an address of the datasets with these URIs, or of any dataset if there are none."""
        datasets = [dataset for dataset in self._datasets if not uris or uris & self._lineage(dataset)]
        takedowns = map(self._takedowns, datasets)
        taken_down = any(row in each.rows or (self._value and each.lists_value(self._value)) for each in takedowns)
        outcomes = [outcome for dataset in datasets if (outcome := outcome_of(dataset, row)) is not None]
        checkpoints, unused, searched = list[dict[str, Any]](), dict[str, str](), 0
        for run in self._runs:
            addresses = self._addresses_in(run, row, uris)
            for name, ledger in checkpoint_ledgers(run):
                searched += 1
                for address, mixed in addresses:
                    if epochs := ledger.epochs_of(address):
                        checkpoints.append({"run": run.uri, "checkpoint": name, "epochs": epochs, **mixed})
            if addresses and not any(use["run"] == run.uri for use in checkpoints):
                share = _head_of(run).identity.get("data.holdout") or 0.0
                if held_out(np.array([row]), share)[0]:
                    unused[run.uri] = "never used: held out by data.holdout"
                else:
                    unused[run.uri] = "never used: taken down" if taken_down else "not used so far"
        return Trace(row, outcomes, taken_down, checkpoints, unused, searched, self._notes)

    def _addresses_in(self, run: Storage, row: int, uris: set[str]) -> list[tuple[int, dict[str, str]]]:
        """Return the addresses that a run uses for a row, each with its dataset if the run mixes several."""
        sources = datasets_of(run)
        plain = _plain_sources(run, sources)
        lineages = [{uri} if uri in plain else self._lineage(open_storage(uri)) for uri in sources]
        return [
            (row + address_offset(number), {"dataset": uri} if len(sources) > 1 else {})
            for number, (uri, lineage) in enumerate(zip(sources or [""], lineages or [uris], strict=True))
            if not uris or uris & lineage
        ]

    def _rows_of_file(self, name: str) -> list[tuple[int, str]]:
        """Return the addresses of an image file in each dataset that is named, or else in those that runs train on."""
        places, errors = list[tuple[int, str]](), list[UserError]()
        trained = dict.fromkeys(uri for run in self._runs for uri in _written_sources(run))
        for dataset in self._named or map(open_storage, trained):
            try:
                places += [(row, dataset.uri) for row in finder(dataset)(name)]
            except UserError as error:
                errors.append(error)
        if not places:
            raise errors[0] if errors else UserError(f"audit: --file: no dataset of {name} here; name its dataset")
        ancestors = {uri for _, dataset in places for uri in self._lineage(open_storage(dataset)) if uri != dataset}
        return [(row, uri) for row, uri in places if uri not in ancestors]  # their rows are the same

    def _rows_with_value(self) -> list[tuple[int, str]]:
        """Find the written rows with a URL or content hash, and refused content; return addresses and datasets."""
        value = self._value
        assert value is not None
        images = [dataset for dataset in self._datasets if read_head(dataset).kind == "images"]
        if not images:
            raise DatasetError(
                f"audit: no images dataset in this lineage, so no {value.kind} is known; give --row instead"
            )
        matches = list[tuple[int, str]]()
        for dataset in images:
            parts = sorted(parts_in(dataset) & read_output(dataset).index.works_by_part().keys())
            rows = {row for _, _, row in in_parts(dataset, parts, {value.kind: {value.value}})}
            if value.kind == "sha256":
                # The account of a row that was left out for its content holds the hash.
                tables = (table.filter(pc.field("detail") == value.value) for table in accounts(dataset, self._notes))
                rows.update(*(table["row"].to_pylist() for table in tables))
            matches += [(row, dataset.uri) for row in sorted(rows)]
        if not matches:
            where = ", ".join(dataset.uri for dataset in images)
            listed = any(self._takedowns(dataset).lists_value(value) for dataset in images)
            state = "; it is listed as taken down" if listed else ""
            raise DatasetError(
                f"audit: no written row with {value.kind} {value.value} in {where}{state}; check the value"
            )
        return matches


def outcome_of(storage: Storage, row: int) -> dict[str, Any] | None:
    """Return the outcome of an address in a dataset; None if its account has none."""
    output, problems = read_output(storage), list[str]()
    if not output.index.units.start <= row < output.index.units.stop:
        return None
    tables = accounts(storage, problems, int(output.index.units.of_rows(np.array([row]))[0]))
    records = [record for table in tables for record in table.filter(pc.field("row") == row).to_pylist()]
    if problems:
        raise DatasetError(problems[0])
    if not records:
        return None
    names = [work.name for work in output.index.works() if work.unit.start <= row < work.unit.stop]
    written = [name for name in names if storage.exists(name)]
    # A retry's part has only the rows that it did again.
    holders = written[:1] + [name for name in written[1:] if row in read_account(storage, name)["row"].to_pylist()]
    return {"uri": storage.uri, "kind": output.head.kind, "part": holders[-1], **records[0]}


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RunHead:
    datasets: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


def datasets_of(run: Storage) -> list[str]:
    """Return the URIs of a run's datasets, in the order of their address ranges."""
    return [resolved(uri, run.uri) for uri in _head_of(run).datasets]


def _head_of(run: Storage) -> _RunHead:
    with reading(run.uri_of(RUN), "restore it from a backup"):
        return parse(_RunHead, read_json(run, RUN))


def _plain_sources(run: Storage, uris: Sequence[str]) -> set[str]:
    """Return the sources that are plain files: the run lists these itself, and nothing else accounts for their rows."""
    return {uri for number, uri in enumerate(uris) if run.exists(f"_source/{number:03d}.parquet")}


def _written_sources(run: Storage) -> list[str]:
    """Return the URIs of a run's datasets that sdp wrote."""
    uris = datasets_of(run)
    plain = _plain_sources(run, uris)
    return [uri for uri in uris if uri not in plain]


def checkpoint_ledgers(run: Storage) -> list[tuple[str, Ledger]]:
    """Read the ledger of every checkpoint of a run; return them with the checkpoints' names."""
    names = [name for name in run.names(CHECKPOINTS) if name.endswith("/" + ledgers.NAME)]
    return [(name.split("/")[1], Ledger.from_bytes(run.read(name), run.uri_of(name))) for name in names]
