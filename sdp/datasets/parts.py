"""Parts: a unit's rows and the account of all its addresses, in one Parquet file that appears whole.

The account is a small Parquet file in the part's footer (key `sdp.account`, base64). So one atomic write publishes
both, and the columns that training reads hold written rows only.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.datasets import records
from sdp.datasets.columns import end_of, parquet_bytes, plain_footer
from sdp.datasets.outcomes import ACCOUNT_SCHEMA, FAILED, WRITTEN, Counts, StoredCounts, count
from sdp.datasets.records import Identifier, Whole, parse
from sdp.datasets.units import Addresses, Unit, Work, parse_part_name, part_name
from sdp.errors import AlreadyExists, DatasetError
from sdp.storage import FileInfo, Storage

FORMAT = 1
_PART_KEY, _ACCOUNT_KEY = b"sdp.part", b"sdp.account"


@dataclass(frozen=True, slots=True)
class PartInfo:
    """The content of a part's footer, read without any row."""

    path: str
    size: int
    etag: str | None
    kind: str
    unit: Unit
    attempt: int
    counts: Counts
    retried: Mapping[str, int]
    """Failures of earlier attempts that this part supersedes, by their reason."""
    row_groups: tuple[tuple[int, int, int], ...]
    """(rows, offset, bytes) of each row group."""
    replaced: tuple[tuple[int, str | None], ...] = ()
    """(size, etag) of the files that had its place before rows were blanked."""

    @property
    def work(self) -> Work:
        return Work(self.unit, self.attempt)

    @property
    def superseded(self) -> int:
        """The number of failures of earlier attempts that no longer hold."""
        return sum(self.retried.values())


@dataclass(frozen=True, slots=True)
class _PartHead:
    """The footer's JSON."""

    format: Whole
    kind: Identifier
    unit: Whole
    start: Whole
    stop: Whole
    attempt: Whole
    counts: StoredCounts
    retried: Mapping[str, Whole]
    replaced: tuple[tuple[Whole, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a part's rows, chosen by measured reading speed."""

    row_group_rows: int = 1024
    compression: Mapping[str, str] | str = "none"
    dictionary: Sequence[str] = ()
    shared: str = ""
    """A column of large values, of which each is stored once if most rows share them; others are read faster so."""


def write_part(
    storage: Storage,
    kind: str,
    work: Work,
    rows: pa.Table,
    account: pa.Table,
    *,
    layout: Layout,
    retried: Mapping[str, int] | None = None,
) -> PartInfo:
    """Publish a part atomically; keep the part that another worker may have published meanwhile."""
    _check_part(work, rows, account)
    data = serialise(kind, work, rows, account, layout=layout, retried=retried)
    try:
        info = storage.create(work.name, data)
    except AlreadyExists:
        return read_info(storage, storage.stat(work.name))
    footer = pq.read_metadata(pa.BufferReader(data))
    return _info(storage, info, footer)


def serialise(
    kind: str,
    work: Work,
    rows: pa.Table,
    account: pa.Table,
    *,
    layout: Layout,
    retried: Mapping[str, int] | None = None,
    replaced: Sequence[tuple[int, str | None]] = (),
) -> pa.Buffer:
    """Return the bytes of a part; the same rows and account give the same bytes."""
    head = {
        "format": FORMAT,
        "kind": kind,
        "unit": work.unit.number,
        "attempt": work.attempt,
        "start": work.unit.start,
        "stop": work.unit.stop,
        "counts": count(account).to_json(),
        "retried": dict(sorted((retried or {}).items())),
        **({"replaced": replaced} if replaced else {}),
    }
    sink = pa.BufferOutputStream()
    kept = {key: value for key, value in (rows.schema.metadata or {}).items() if key not in (_PART_KEY, _ACCOUNT_KEY)}
    rows = rows.replace_schema_metadata(kept)  # without the head and account of a part that it was read from
    codecs = layout.compression if isinstance(layout.compression, str) else dict(layout.compression)
    shared = [*layout.dictionary, *_shared(rows, layout.shared)] or False
    with pq.ParquetWriter(
        sink, rows.schema, compression=codecs, use_dictionary=shared, write_statistics=["row"], write_page_checksum=True
    ) as writer:
        if rows.num_rows:
            writer.write_table(rows, row_group_size=layout.row_group_rows)
        encoded = base64.b64encode(_account_bytes(account))
        # Parquet would store the schema's metadata twice.
        writer.add_key_value_metadata({_PART_KEY: json.dumps(head).encode(), _ACCOUNT_KEY: encoded})
    return sink.getvalue()


def _shared(rows: pa.Table, name: str) -> list[str]:
    """Return the column if it has at most half as many values as rows, by the ends of the values."""
    ends = pc.binary_slice(rows[name], -64) if name in rows.column_names else ()
    return [name] if len(ends) and 2 * pc.count_distinct(ends).as_py() <= len(ends) else []


def read_info(storage: Storage, file: FileInfo) -> PartInfo:
    """Read a part's footer."""
    return _info(storage, file, _open(storage, file.path).metadata)


def attempt_of(footer: pq.FileMetaData) -> int:
    """Return the attempt of a part by its footer; 0 for any other file."""
    head = (footer.metadata or {}).get(_PART_KEY)
    return 0 if head is None else parse(_PartHead, head).attempt


def read_account(storage: Storage, path: str) -> pa.Table:
    """Read the account of a part: all its addresses, in order."""
    return _account(storage, path, _open(storage, path).metadata)


def read_footer(storage: Storage, file: FileInfo) -> tuple[PartInfo, pa.Table]:
    """Read a part's footer and account with one access to the file."""
    footer = _open(storage, file.path).metadata
    return _info(storage, file, footer), _account(storage, file.path, footer)


def read_rows(storage: Storage, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the written rows of a part, verifying every page's checksum."""
    file = _open(storage, path, verify=True)
    with reading(storage, path):
        return file.read(columns=None if columns is None else list(columns))


def read_layout(storage: Storage, path: str) -> Layout:
    """Read the layout of a part that has rows."""
    group = _open(storage, path).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    codecs = {column.path_in_schema: column.compression.lower().replace("uncompressed", "none") for column in columns}
    return Layout(group.num_rows, codecs, [column.path_in_schema for column in columns if column.has_dictionary_page])


def iter_rows(storage: Storage, path: str, columns: Sequence[str] | None, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Read the written rows of a part in batches, so that a large part need not be held whole."""
    file = _open(storage, path, verify=True)
    with reading(storage, path):
        yield from file.iter_batches(batch_rows, columns=None if columns is None else list(columns))


def verify_part(storage: Storage, file: FileInfo) -> PartInfo:
    """Read all of a part and check that its rows are those of its account."""
    info, account = read_footer(storage, file)
    rows = read_rows(storage, file.path)
    with reading(storage, file.path):
        _check_part(info.work, rows, account)
        if count(account) != info.counts:
            raise ValueError("its counts are not those of its account")
    return info


def resolve(accounts: Sequence[pa.Table]) -> pa.Table:
    """Merge the accounts of a unit's attempts, in their order, into one outcome for each address.

    A later attempt supersedes an earlier one for the addresses that it names; their numbers of attempts are added.
    """
    if len(accounts) == 1:
        return accounts[0]
    rows = np.concatenate([a["row"].to_numpy() for a in accounts])
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    table = pa.concat_tables(accounts).take(pa.array(order)).combine_chunks()
    tries = np.add.reduceat(table["attempts"].to_numpy(), np.flatnonzero(np.append(True, last[:-1])))
    resolved = table.filter(pa.array(last))
    at = resolved.schema.get_field_index("attempts")
    tries = np.minimum(tries, np.iinfo(np.int16).max).astype(np.int16)
    return resolved.set_column(at, ACCOUNT_SCHEMA.field("attempts"), pa.array(tries))


def failed_before(storage: Storage, work: Work) -> tuple[Addresses, dict[str, int]]:
    """Return the addresses of a unit that failed in the attempts before this one, and their number by reason."""
    paths = [part_name(work.unit.number, attempt) for attempt in range(work.attempt)]
    account = resolve([read_account(storage, path) for path in paths if storage.exists(path)])
    failed = account.filter(pc.field("outcome") == FAILED)
    return np.asarray(failed["row"].to_numpy(), dtype=np.int64), dict(Counter(failed["reason"].to_pylist()))


def _check_part(work: Work, rows: pa.Table, account: pa.Table) -> None:
    """Raise ValueError if rows and account contradict each other."""
    unit = work.unit
    accounted = account["row"].to_numpy()
    if len(accounted) and (accounted[0] < unit.start or accounted[-1] >= unit.stop):
        raise ValueError(f"{work.name}: the account has rows outside {unit.start}…{unit.stop - 1}")
    if np.any(np.diff(accounted) <= 0):
        raise ValueError(f"{work.name}: the account names a row twice or out of order")
    written = account.filter(pc.field("outcome") == WRITTEN)["row"].to_numpy()
    if not np.array_equal(rows["row"].to_numpy(), written):
        raise ValueError(f"{work.name}: the rows are not the account's written rows")


def _account_bytes(account: pa.Table) -> pa.Buffer:
    return parquet_bytes(
        account,
        use_dictionary=["outcome", "reason", "detail", "attempts"],
        column_encoding={"row": "DELTA_BINARY_PACKED"},  # consecutive addresses take almost no space as deltas
        write_statistics=False,
        store_schema=False,
    )


def _open(storage: Storage, path: str, *, verify: bool = False) -> pq.ParquetFile:
    source = storage.open(path)
    with reading(storage, path):
        footer = plain_footer(storage.uri_of(path), end_of(source)[0])
        return pq.ParquetFile(source, metadata=footer, pre_buffer=True, page_checksum_verification=verify)


def _info(storage: Storage, file: FileInfo, footer: pq.FileMetaData) -> PartInfo:
    with reading(storage, file.path):
        head = parse(_PartHead, _metadata(footer, _PART_KEY))
        info = PartInfo(
            path=file.path,
            size=file.size,
            etag=file.etag,
            kind=head.kind,
            unit=Unit(head.unit, head.start, head.stop),
            attempt=head.attempt,
            counts=head.counts,
            retried=head.retried,
            row_groups=tuple(_row_group(footer.row_group(i)) for i in range(footer.num_row_groups)),
            replaced=head.replaced,
        )
        if head.format != FORMAT:
            raise DatasetError(
                f"{storage.uri_of(file.path)}: written in format {head.format}, but this sdp reads format {FORMAT}; "
                "use a newer sdp"
            )
        if parse_part_name(file.path) != (info.unit.number, info.attempt):
            raise ValueError(f"it is part {info.work.name} under another name")
        return info


def _row_group(group: pq.RowGroupMetaData) -> tuple[int, int, int]:
    columns = [group.column(i) for i in range(group.num_columns)]
    starts = [c.dictionary_page_offset or c.data_page_offset for c in columns]
    return group.num_rows, min(starts), sum(c.total_compressed_size for c in columns)


def _account(storage: Storage, path: str, footer: pq.FileMetaData) -> pa.Table:
    with reading(storage, path):
        data = base64.b64decode(_metadata(footer, _ACCOUNT_KEY), validate=True)
        return pq.ParquetFile(pa.BufferReader(data)).read().cast(ACCOUNT_SCHEMA)


def _metadata(footer: pq.FileMetaData, key: bytes) -> bytes:
    value = (footer.metadata or {}).get(key)
    if value is None:
        raise ValueError(f"not a part of sdp: its footer has no {key.decode()}")
    return bytes(value)


def reading(storage: Storage, path: str) -> AbstractContextManager[None]:
    """Turn errors from a part's content, while it is read, into one line."""
    hint = "delete this file and run the job again, which rewrites it"
    return records.reading(storage.uri_of(path), hint, "corrupt part")
