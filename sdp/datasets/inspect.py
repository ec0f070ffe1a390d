"""Looking at a dataset: what is there, what is missing, what went wrong and why."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sdp.datasets import repeated, tombstones
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import MANIFEST, open_dataset, total
from sdp.datasets.outcomes import ACCOUNT_SCHEMA, Counts
from sdp.datasets.output import HEAD, Output, read_output
from sdp.datasets.parts import PartInfo, iter_rows, read_account, read_info, resolve, verify_part
from sdp.datasets.units import PARTS, parse_part_name, part_name
from sdp.errors import DatasetError, NotFound
from sdp.storage import FileInfo, Storage, StorageOptions, list_source, open_source

_SHOWN = 5


@dataclass(frozen=True)
class Description:
    """What `sdp inspect` tells of a dataset."""

    uri: str
    kind: str
    complete: bool
    rows: int
    """Addresses put up for work."""
    counts: Counts
    parts: int
    parts_ordered: int
    bytes: int
    schema: dict[str, str]
    missing: list[dict[str, int]] = field(default_factory=list)
    """The first units without a part: unit, start, stop, attempt."""
    problems: list[str] = field(default_factory=list)
    """Parts that are corrupt, truncated, changed or gone, each named."""
    lineage: list[str] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)
    tombstones: int = 0
    manifest_version: int | None = None
    created: str | None = None
    sdp: str | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    verified: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "counts": self.counts.to_json()}


def describe(storage: Storage, options: StorageOptions | None = None, *, verify: bool = False) -> Description:
    """Describe a dataset of sdp, or a folder of plain Parquet files."""
    if not storage.exists(HEAD):
        return _describe_plain(storage, options)
    output = read_output(storage)
    files = [f for f in storage.list(PARTS) if parse_part_name(f.path) is not None]
    infos, problems = _infos(output, files, verify)
    works = output.index.works()
    done = {(p.unit.number, p.attempt) for p in infos}
    missing = [w for w in works if (w.unit.number, w.attempt) not in done]
    complete = storage.exists(MANIFEST)
    manifest = open_dataset(storage).manifest if complete else None
    if manifest is not None:
        problems += _against_manifest(open_dataset(storage).parts, files, storage)
    readable = [p for p in infos if p.counts.written]
    return Description(
        uri=storage.uri,
        kind=output.head.kind,
        complete=complete and not missing and not problems,
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
        lineage=[s.uri for s in tombstones.lineage(storage, options)][1:] + _root(output),
        models=dict(manifest.models) if manifest else {},
        tombstones=len(tombstones.load(storage, options)),
        manifest_version=manifest.version if manifest else None,
        created=manifest.created if manifest else None,
        sdp=manifest.sdp if manifest else None,
        samples=_samples(storage, readable[:1]),
        verified=verify,
    )


def accounts(storage: Storage) -> Iterator[pa.Table]:
    """The one outcome of every address, unit by unit in order of address."""
    names = [(part, n) for n in storage.names(PARTS) if (part := parse_part_name(n)) is not None]
    units = [sorted(attempts) for _, attempts in groupby(sorted(names), key=lambda item: item[0][0])]

    again = repeated.of_storage(storage)

    def unit_account(attempts: list[tuple[tuple[int, int], str]]) -> pa.Table:
        account = resolve([read_account(storage, name) for _, name in attempts])
        return account if again is None else again.overlay(account)

    return ordered_map(unit_account, units, workers=16)


def write_account(storage: Storage, file: Path) -> int:
    """Write every address with its outcome, reason, detail and number of attempts; returns how many there are."""
    rows = 0
    unfinished = file.with_name(file.name + ".part")
    with pq.ParquetWriter(unfinished, ACCOUNT_SCHEMA, compression="zstd") as writer:
        for account in accounts(storage):
            if account.num_rows:
                writer.write_table(account)
            rows += account.num_rows
    unfinished.replace(file)
    return rows


def _infos(output: Output, files: Iterable[FileInfo], verify: bool) -> tuple[list[PartInfo], list[str]]:
    storage = output.storage

    def look(file: FileInfo) -> PartInfo | str:
        try:
            return verify_part(storage, file) if verify else read_info(storage, file)
        except DatasetError as error:
            return str(error)

    seen = list(ordered_map(look, files))
    return [p for p in seen if isinstance(p, PartInfo)], [p for p in seen if isinstance(p, str)]


def _against_manifest(listed: pa.Table, files: Iterable[FileInfo], storage: Storage) -> list[str]:
    """What has become of the parts since the manifest was written."""
    there = {f.path: f for f in files}
    problems = []
    for path, size in zip(listed["path"].to_pylist(), listed["size"].to_pylist(), strict=True):
        file = there.get(path)
        if file is None:
            problems.append(f"{storage.uri_of(path)}: gone since the manifest was written; run the job again")
        elif file.size != size:
            problems.append(
                f"{storage.uri_of(path)}: {file.size} bytes, the manifest says {size}; delete it and run the job again"
            )
    return problems


def _schema(storage: Storage, infos: list[PartInfo]) -> dict[str, str]:
    if not infos:
        return {}
    schema = pq.read_schema(storage.open(infos[0].path))
    return {f.name: _type(f) for f in schema}


def _type(column: pa.Field) -> str:
    metadata = {k.decode(): v.decode() for k, v in (column.metadata or {}).items() if not k.startswith(b"PARQUET:")}
    return f"{column.type} {metadata}" if metadata else str(column.type)


def _samples(storage: Storage, infos: list[PartInfo]) -> list[dict[str, Any]]:
    for info in infos:
        for batch in iter_rows(storage, info.path, None, 3):
            return [{name: _short(value) for name, value in row.items()} for row in batch.to_pylist()]
    return []


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and len(value) > 100:
        return value[:99] + "…"
    return value


def _root(output: Output) -> list[str]:
    """Where a dataset's rows came from at first, if it was made from plain files."""
    index = output.index
    if output.head.derived or not index.files.num_rows:
        return []
    first = index.files["path"][0].as_py()
    more = index.files.num_rows - 1
    return [f"{first} and {more} more" if more else str(first)]


def _describe_plain(storage: Storage, options: StorageOptions | None) -> Description:
    try:
        files = list_source(storage.uri, options)
    except NotFound as error:
        raise DatasetError(
            f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor Parquet files; check the address"
        ) from error
    problems, rows, schema = [], 0, dict[str, str]()
    for file in files:
        try:
            footer = pq.read_metadata(open_source(file.uri, options))
        except (pa.ArrowException, OSError) as error:
            problems.append(f"{file.uri}: not a whole Parquet file ({' '.join(str(error).split())[:120]})")
            continue
        rows += footer.num_rows
        schema = schema or {f.name: str(f.type) for f in footer.schema.to_arrow_schema()}
    return Description(
        uri=storage.uri,
        kind="parquet",
        complete=not problems,
        rows=rows,
        counts=Counts(written=rows),
        parts=len(files),
        parts_ordered=len(files),
        bytes=sum(f.size for f in files),
        schema=schema,
        problems=problems,
    )


def summary(description: Description) -> str:
    """A description as a person reads it."""
    from sdp.console import size, table

    d = description
    state = "complete" if d.complete else "INCOMPLETE"
    if d.verified and not d.problems:
        state += ", every byte verified"
    lines = [
        f"{d.uri}",
        f"{d.kind}, {state}: {d.rows:,} addresses in {d.parts:,} of {d.parts_ordered:,} parts, {size(d.bytes)}",
    ]
    if d.manifest_version:
        lines.append(f"manifest version {d.manifest_version}, {d.created}, sdp {d.sdp}")
    if d.lineage:
        lines.append("made from " + " ← ".join(d.lineage))
    if d.tombstones:
        lines.append(f"{d.tombstones:,} takedowns hold")
    lines += ["", _counts_table(d.counts)]
    if d.missing:
        left = d.parts_ordered - d.parts
        lines += ["", f"{left:,} parts are missing; the first:"]
        lines.append(
            table(
                [(part_name(m["unit"], m["attempt"]), m["start"], m["stop"]) for m in d.missing], ("part", "from", "to")
            )
        )
        lines.append("Run the job that writes it again: it does the rest.")
    if d.problems:
        lines += ["", f"{len(d.problems):,} problems:", *(f"  {problem}" for problem in d.problems[:20])]
    lines += ["", table(d.schema.items(), ("column", "type"))]
    for sample in d.samples:
        lines += ["", table(sample.items())]
    return "\n".join(lines)


def _counts_table(counts: Counts) -> str:
    from sdp.console import table

    share = max(counts.input, 1)
    rows = [(name, f"{n:,}", f"{100 * n / share:.1f}%") for name, n in list(counts.to_json().items())[:4]]
    rows += [(f"  {reason}", f"{n:,}", f"{100 * n / share:.1f}%") for reason, n in counts.reasons.items()]
    return table(rows, ("outcome", "addresses", "share"))
