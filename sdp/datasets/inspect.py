"""The description of a dataset: its parts, what is missing, what is damaged, and the outcomes by reason."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.datasets import repeated, tombstones
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import MANIFEST, Dataset, open_dataset, refuse_foreign, repeated_rows, total
from sdp.datasets.outcomes import ACCOUNT_SCHEMA, REPEATED, TAKEN_DOWN, Counts, relabelled
from sdp.datasets.output import Output, read_output
from sdp.datasets.parts import PartInfo, iter_rows, read_footer, read_info, resolve, verify_part
from sdp.datasets.tombstones import Tombstones
from sdp.datasets.units import PARTS, Work, parse_part_name
from sdp.errors import DatasetError, NotFound, SdpError
from sdp.storage import FileInfo, Storage
from sdp.storage.named import written_for

T = TypeVar("T")
_SHOWN = 5
_SAMPLES, _SAMPLE_BATCH = 3, 16
_UPSTREAM_S = 10.0
"""Time for one operation on an ancestor."""


@dataclass(frozen=True)
class Description:
    """The description of a dataset."""

    uri: str
    kind: str
    complete: bool
    rows: int
    """Addresses in the index."""
    counts: Counts
    parts: int
    parts_ordered: int
    bytes: int
    schema: dict[str, str]
    missing: list[dict[str, int]] = field(default_factory=list)
    """The first units without a part: unit, start, stop, attempt."""
    problems: list[str] = field(default_factory=list)
    """One line for each part that is corrupt, truncated, changed or gone."""
    notes: list[str] = field(default_factory=list)
    """One line for each foreign file, and for each ancestor that cannot be read."""
    lineage: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    tombstones: int = 0
    manifest_version: int | None = None
    created: str | None = None
    sdp: str | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    verified: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "counts": self.counts.to_json()}


def describe(storage: Storage, *, verify: bool = False) -> Description:
    """Describe a dataset; `verify` reads every byte of it."""
    output = read_output(storage)
    files = [f for f in storage.list(PARTS) if parse_part_name(f.path) is not None]
    works = output.index.works_by_part()
    problems: list[str] = []
    infos = _infos(storage, files, works, problems, verify=verify)
    done = {(p.unit.number, p.attempt) for p in infos}
    missing = [work for part, work in works.items() if part not in done]
    dataset = _try_read(problems, lambda: open_dataset(storage)) if storage.exists(MANIFEST) else None
    manifest = dataset.manifest if dataset is not None else None
    if dataset is not None:
        problems += _against_manifest(dataset.parts, files, storage)
        problems += _against_parts(dataset, output, infos)
    taken, lineage, notes = _ancestry(storage, problems)
    samples = _samples(storage, next((p for p in infos if p.counts.written), None), taken, problems)
    return Description(
        uri=storage.uri,
        kind=output.head.kind,
        complete=manifest is not None and not missing and not problems,
        rows=output.index.rows,
        counts=repeated.without(total(infos), manifest.repeated if manifest else 0),
        parts=len(infos),
        parts_ordered=len(works),
        bytes=sum(f.size for f in files),
        schema=_schema(storage, infos),
        missing=[
            {"unit": w.unit.number, "attempt": w.attempt, "start": w.unit.start, "stop": w.unit.stop}
            for w in missing[:_SHOWN]
        ],
        problems=sorted(set(problems)),
        notes=notes,
        lineage=lineage + _root(output),
        config=dict(manifest.config) if manifest else {},
        models=dict(manifest.models) if manifest else {},
        tombstones=len(taken),
        manifest_version=manifest.version if manifest else None,
        created=manifest.created if manifest else None,
        sdp=manifest.sdp if manifest else None,
        samples=samples,
        verified=verify,
    )


def accounts(storage: Storage, problems: list[str]) -> Iterator[pa.Table]:
    """Yield the outcome of every address, unit by unit in order of address; rows that readers leave out say so.

    A damaged or foreign part does not count; a line about it is added to `problems`.
    """
    works = read_output(storage).index.works_by_part()
    files = {part: f for f in storage.list(PARTS) if (part := parse_part_name(f.path)) in works}
    units = [list(attempts) for _, attempts in groupby(sorted(files), key=lambda part: part[0])]
    repeats, taken = _try_read(problems, lambda: repeated_rows(storage)), tombstones.load(storage)

    def account_of(part: tuple[int, int]) -> pa.Table:
        info, account = read_footer(storage, files[part])
        refuse_foreign(storage, info, works)
        return account

    def unit_account(attempts: list[tuple[int, int]]) -> pa.Table:
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
    """Write every address with its outcome, reason, detail and number of attempts.

    Return their number, and a line for each part whose addresses are missing.
    """
    rows, problems = 0, list[str]()
    with (
        written_for("inspect: --account", file) as sink,
        pq.ParquetWriter(sink, ACCOUNT_SCHEMA, compression="zstd") as writer,
    ):
        for account in accounts(storage, problems):
            if account.num_rows:
                writer.write_table(account)
            rows += account.num_rows
    return rows, problems


def with_problems(description: Description, problems: Iterable[str]) -> Description:
    """Return the description with further problems."""
    all_problems = sorted({*description.problems, *problems})
    return replace(description, problems=all_problems, complete=description.complete and not all_problems)


def _try_read(problems: list[str], read: Callable[[], T]) -> T | None:
    """Return the result of a read; on an error in the dataset, add it to the problems and return None."""
    try:
        return read()
    except (DatasetError, NotFound) as error:
        problems.append(str(error))
        return None


def _infos(
    storage: Storage,
    files: Iterable[FileInfo],
    works: Mapping[tuple[int, int], Work],
    problems: list[str],
    *,
    verify: bool,
) -> list[PartInfo]:
    def look(file: FileInfo) -> PartInfo:
        info = verify_part(storage, file) if verify else read_info(storage, file)
        refuse_foreign(storage, info, works)
        return info

    infos = ordered_map(lambda file: _try_read(problems, lambda: look(file)), files)
    return [info for info in infos if info is not None]


def _ancestry(storage: Storage, problems: list[str]) -> tuple[Tombstones, list[str], list[str]]:
    """Return the takedowns that apply, the URIs of the ancestors, and notes on files that are unreadable or foreign."""
    limited = replace(storage.options, timeout_s=min(storage.options.timeout_s, _UPSTREAM_S))
    chain, notes = list[Storage](), list[str]()
    try:
        for dataset in tombstones.follow(storage, limited):
            chain.append(dataset)
    except SdpError as error:
        if len(chain) > 1:
            notes.append(f"{chain[-1].uri}, which it was made from, cannot be read ({error})")
        elif not isinstance(error, DatasetError):  # a DatasetError is about the dataset's own manifest, reported above
            notes.append(f"the dataset that it was made from cannot be read ({error})")
    taken = Tombstones(BitMap64())
    for dataset in chain:
        try:
            own = tombstones.load_from([dataset])
        except SdpError as error:
            (problems if dataset is storage else notes).append(f"its takedowns cannot be read: {error}")
            continue
        taken |= own
    foreign = tombstones.foreign_files(storage)[:_SHOWN]
    notes += [f"{storage.uri_of(name)}: not a takedown list of sdp, so it is ignored" for name in foreign]
    return taken, [dataset.uri for dataset in chain[1:]], notes


def _against_manifest(listed: pa.Table, files: Iterable[FileInfo], storage: Storage) -> list[str]:
    """Return a line for each part that is gone or changed since the manifest was written."""
    by_path = {f.path: f for f in files}
    problems = []
    for path, size in zip(listed["path"].to_pylist(), listed["size"].to_pylist(), strict=True):
        file = by_path.get(path)
        if file is None:
            problems.append(f"{storage.uri_of(path)}: gone since the manifest was written; run the job again")
        elif file.size != size:
            problems.append(
                f"{storage.uri_of(path)}: {file.size} bytes, the manifest says {size}; if `sdp audit --rewrite` was "
                "interrupted, run it again, otherwise delete the file and run the job again"
            )
    return problems


def _against_parts(dataset: Dataset, output: Output, infos: Sequence[PartInfo]) -> list[str]:
    """Return a line for each figure of the manifest that its parts contradict."""
    manifest, listed = dataset.manifest, dataset.parts
    paths = set(listed["path"].to_pylist())
    own = [info for info in infos if info.path in paths]
    figures: list[tuple[str, object, object]] = [
        ("kind", manifest.kind, output.head.kind),
        ("parts", manifest.parts, listed.num_rows),
        ("size", manifest.size, sum(listed["size"].to_pylist())),
        ("rows", manifest.rows, max(listed["stop"].to_pylist(), default=0)),
    ]
    if len(own) == len(paths):  # missing and broken parts are reported on their own
        actual = repeated.without(total(own), manifest.repeated).to_json()
        listed_counts = manifest.counts.to_json()
        figures += [(f"counts.{name}", listed_counts[name], actual[name]) for name in actual]
    where = dataset.storage.uri_of(MANIFEST)
    return [
        f"{where}: {name} is {in_manifest}, but {in_parts} in its parts; run the job again to rewrite it"
        for name, in_manifest, in_parts in figures
        if in_manifest != in_parts
    ]


def _schema(storage: Storage, infos: list[PartInfo]) -> dict[str, str]:
    if not infos:
        return {}
    schema = pq.read_schema(storage.open(infos[0].path))
    return {f.name: _type(f) for f in schema}


def _type(column: pa.Field) -> str:
    metadata = {k.decode(): v.decode() for k, v in (column.metadata or {}).items() if not k.startswith(b"PARQUET:")}
    return f"{column.type} {metadata}" if metadata else str(column.type)


def _samples(storage: Storage, part: PartInfo | None, taken: Tombstones, problems: list[str]) -> list[dict[str, Any]]:
    """Return a few rows of a part that are not taken down; none if the part is damaged."""

    def read(part: PartInfo) -> list[dict[str, Any]]:
        batches = iter_rows(storage, part.path, None, _SAMPLE_BATCH)
        rows = (row for batch in batches for row in batch.to_pylist() if row.get("row") not in taken.rows)
        return [{name: _short(value) for name, value in row.items()} for row in islice(rows, _SAMPLES)]

    return (part and _try_read(problems, lambda: read(part))) or []


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and len(value) > 100:
        return value[:99] + "…"
    return value


def _root(output: Output) -> list[str]:
    """Return the source of a dataset that was made from plain files."""
    index = output.index
    if output.head.derived or not index.files.num_rows:
        return []
    first = index.files["path"][0].as_py()
    more = index.files.num_rows - 1
    return [f"{first} and {more} more" if more else str(first)]
