"""The description of a dataset: its parts, what is missing, what is damaged, and the outcomes by reason."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import CSVWriter

from sdp.console import counted
from sdp.datasets import repeated, tombstones
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import MANIFEST, Dataset, open_dataset, refuse_foreign, repeated_rows, total
from sdp.datasets.names import names_of
from sdp.datasets.outcomes import ACCOUNT_SCHEMA, REPEATED, TAKEN_DOWN, Counts, relabelled
from sdp.datasets.output import Output, read_output
from sdp.datasets.parts import PartInfo, read_footer, read_info, resolve, verify_part
from sdp.datasets.tombstones import Tombstones
from sdp.datasets.units import PARTS, PartKey, Work, parse_part_name
from sdp.errors import DatasetError, NotFound, SdpError
from sdp.storage import FileInfo, Storage
from sdp.storage.named import written_for

T = TypeVar("T")
_UPSTREAM_S = 10.0
"""Time for one operation on an ancestor, and on its takedowns."""


@dataclass(frozen=True)
class Description:
    """The description of a dataset."""

    output: Output
    files: Sequence[FileInfo]
    """The files of all parts."""
    parts: Sequence[PartInfo]
    """The parts that can be read."""
    dataset: Dataset | None
    """The dataset by its manifest; None if this is missing or damaged."""
    taken_down: Tombstones | None
    """The takedowns that apply; None if some cannot be read."""
    lineage: Sequence[str]
    """The URIs of the datasets and the files that it was made from."""
    problems: list[str]
    """One line for each thing that is corrupt, truncated, changed or gone."""
    notes: list[str]
    """One line for each ancestor that cannot be read."""

    @cached_property
    def missing(self) -> list[Work]:
        """The works without a readable part."""
        done = {part.work for part in self.parts}
        return [work for work in self.output.index.works() if work not in done]

    @property
    def complete(self) -> bool:
        return self.dataset is not None and not self.problems and not self.missing

    @cached_property
    def counts(self) -> Counts:
        return repeated.without(total(self.parts), self.dataset.manifest.repeated if self.dataset else 0)

    def to_json(self) -> dict[str, Any]:
        manifest = self.dataset.manifest if self.dataset else None
        return {
            "kind": self.output.head.kind,
            "complete": self.complete,
            "rows": self.output.index.rows,
            "counts": self.counts.to_json(),
            "parts": len(self.parts),
            "missing": [work.name for work in self.missing],
            "bytes": sum(file.size for file in self.files),
            "takedowns": len(self.taken_down or ()),
            "lineage": self.lineage,
            "notes": self.notes,
            "columns": dict(manifest.schema) if manifest else {},
            "config": dict(manifest.config) if manifest else {},
            "models": dict(manifest.models) if manifest else {},
            "version": manifest.version if manifest else None,
        }


def describe(storage: Storage, *, verify: bool = False) -> Description:
    """Describe a dataset; `verify` reads every byte of it."""
    output, problems, notes = read_output(storage), list[str](), list[str]()
    files = [file for file in storage.list(PARTS) if parse_part_name(file.path) is not None]
    works = output.index.works_by_part()

    def look(file: FileInfo) -> PartInfo:
        info = verify_part(storage, file) if verify else read_info(storage, file)
        refuse_foreign(storage, info, works)
        return info

    read = ordered_map(lambda file: _try_read(problems, lambda: look(file)), files)
    parts = [info for info in read if info is not None]
    dataset = _try_read(problems, lambda: open_dataset(storage)) if storage.exists(MANIFEST) else None
    if dataset is not None:
        problems += _contradictions(dataset, {file.path: file.size for file in files}, parts)
    taken_down, lineage = _ancestry(storage, problems, notes)
    sources = output.index.files
    if not output.head.derived and sources.num_rows:
        lineage.append(f"{sources['path'][0].as_py()}, {counted(sources.num_rows, 'file')} in all")
    return Description(output, files, parts, dataset, taken_down, lineage, sorted(set(problems)), notes)


def accounts(storage: Storage, problems: list[str], unit: int | None = None) -> Iterator[pa.Table]:
    """Yield the outcome of every address, by unit or of one unit, in order.

    For rows that readers leave out it is `taken_down` or `repeated`.
    A damaged or foreign part does not count; a line about it is added to `problems`.
    """
    works = read_output(storage).index.works_by_part()
    names = [work.name for (number, _), work in works.items() if number == unit]
    listed = storage.list(PARTS) if unit is None else (storage.stat(name) for name in names if storage.exists(name))
    files = {part: file for file in listed if (part := parse_part_name(file.path)) in works}
    units = [list(attempts) for _, attempts in groupby(sorted(files), key=lambda part: part[0])]
    repeats, taken = _try_read(problems, lambda: repeated_rows(storage)), tombstones.load(storage)

    def account_of(part: PartKey) -> pa.Table:
        info, account = read_footer(storage, files[part])
        refuse_foreign(storage, info, works)
        return account

    def unit_account(attempts: list[PartKey]) -> pa.Table:
        read = (_try_read(problems, partial(account_of, part)) for part in attempts)
        by_attempt = [account for account in read if account is not None]
        if not by_attempt:
            return ACCOUNT_SCHEMA.empty_table()
        account = resolve(by_attempt)
        rows = account["row"].to_numpy()
        account = relabelled(account, taken.mask(rows.tolist()), TAKEN_DOWN, "tombstone")
        return account if repeats is None else relabelled(account, repeats.mask(rows), REPEATED, repeated.REASON)

    return ordered_map(unit_account, units, workers=16)


def write_account(storage: Storage, file: Path) -> tuple[int, list[str]]:
    """Write every address with its outcome, reason, detail, number of attempts, and its name in the source.

    Return their number, and a line for each part whose addresses are missing.
    """
    rows, problems = 0, list[str]()
    schema = ACCOUNT_SCHEMA.append(pa.field("name", pa.string()))
    open_writer: Any = CSVWriter if file.suffix == ".csv" else partial(pq.ParquetWriter, compression="zstd")
    with written_for("inspect: --account", file) as sink, open_writer(sink, schema) as writer:
        for account in with_names(storage, accounts(storage, problems)):
            writer.write_table(account)
            rows += account.num_rows
    return rows, problems


def with_names(storage: Storage, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield accounts with a column of the rows' names in the source."""
    names = names_of(storage)
    for account in tables:
        if account.num_rows:
            named = [name or None for name in names(account["row"].to_numpy())]
            yield account.append_column("name", pa.array(named, pa.string()))


def _try_read(problems: list[str], read: Callable[[], T]) -> T | None:
    """Return the result of a read; on an error in the dataset, add it to the problems and return None."""
    try:
        return read()
    except (DatasetError, NotFound) as error:
        problems.append(str(error))
        return None


def _ancestry(storage: Storage, problems: list[str], notes: list[str]) -> tuple[Tombstones | None, list[str]]:
    """Return the takedowns that apply (None if some cannot be read) and the URIs of the ancestors.

    A damaged file of this dataset is a problem; any other error, such as a store that is away, is only a note.
    """
    hasty = storage.with_options(timeout_s=min(storage.options.timeout_s, _UPSTREAM_S))
    try:
        chain = list(tombstones.lineage(hasty))
        return tombstones.load_from(chain), [dataset.uri for dataset in chain[1:]]
    except SdpError as error:
        is_own = isinstance(error, DatasetError) and str(error).startswith(f"{storage.uri}/")
        (problems if is_own else notes).append(f"its takedowns or its origin cannot be read: {error}")
        return None, []


def _contradictions(dataset: Dataset, sizes: Mapping[str, int], parts: Sequence[PartInfo]) -> Iterator[str]:
    """Yield a line for each part that is gone or changed since the manifest, and for each count that is wrong."""
    manifest, listed, uri_of = dataset.manifest, dataset.parts, dataset.storage.uri_of
    paths = listed["path"].to_pylist()
    for path, size in zip(paths, listed["size"].to_pylist(), strict=True):
        if sizes.get(path) != size:
            state = f"{sizes[path]} bytes" if path in sizes else "gone"
            yield (
                f"{uri_of(path)}: {state}, but the manifest says {size} bytes; if `sdp audit --rewrite` was "
                "interrupted, run it again, otherwise run the job again without this file"
            )
    known = set(paths)
    own = [part for part in parts if part.path in known]
    if len(own) < len(paths):
        return  # missing and broken parts are reported on their own
    actual = repeated.without(total(own), manifest.repeated).to_json()
    for name, count in manifest.counts.to_json().items():
        if count != actual[name]:
            yield (
                f"{uri_of(MANIFEST)}: counts.{name} is {count}, but {actual[name]} in its parts; run the job again to "
                "rewrite it"
            )
