"""Tables joined to the rows of a source: captions and scores that are not in the images' own files.

A table joined by address must be sorted by it, so that only the row groups for a piece's addresses are read. A table
joined by another column is read whole in every worker, and so may have MOST_ROWS rows.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.config.process import JoinedTable
from sdp.datasets.columns import kind_of
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.footers import read_new_footer
from sdp.datasets.parts import attempt_of
from sdp.datasets.scores import Mask
from sdp.datasets.units import Addresses
from sdp.errors import DatasetError
from sdp.sources.groups import RowGroup, read_rows
from sdp.storage import SourceFile, StorageOptions, list_source
from sdp.storage.moved import with_sample

ROW = "row"
"""The column of addresses."""
MOST_ROWS = 1_000_000
_CACHED = 4
_lock = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A table that is joined to a source's rows."""

    uri: str
    by: str
    drop: bool
    """True if rows without an entry are left out."""
    columns: tuple[str, ...]
    """Those of its columns that are used."""
    groups: tuple[RowGroup, ...]
    """Sorted by address if the table is joined by it."""
    first: Addresses
    """The lowest address of each row group."""
    last: Addresses
    """The highest address of each row group."""
    digest: str
    """A digest of its files."""

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def join(self, table: pa.Table, rows: Addresses, options: StorageOptions | None) -> tuple[pa.Table, Mask]:
        """Return the source's rows at some addresses with this table's columns, and which rows it has an entry for.

        Its values take the place of the source's own where they are neither null nor empty.
        """
        entries, present = self._find(pa.chunked_array([rows]) if self.by == ROW else table[self.by], options)
        for name, values in zip(entries.column_names, entries.columns, strict=True):
            if pa.types.is_large_binary(values.type):  # a model's empty caption is none
                values = pc.if_else(pc.match_substring_regex(values, r"\S"), values, pa.scalar(None, values.type))
            if name not in table.column_names:
                table = table.append_column(name, values)
                continue
            if not pa.types.is_null(table[name].type):
                values = pc.coalesce(values, _plain(table[name], name).cast(values.type, safe=False))
            table = table.set_column(table.column_names.index(name), name, values)
        return table, present

    def _find(self, keys: pa.ChunkedArray, options: StorageOptions | None) -> tuple[pa.Table, Mask]:
        """Return the entries of some keys, in their order and null where there is none, and which keys have one."""
        wanted = _plain(keys, self.by)
        with _lock:  # threads that need the same row group read it once
            names, groups = (self.by, *self.columns), [self.groups]
            if self.by == ROW:
                rows = np.sort(wanted.to_numpy())
                holds = np.searchsorted(rows, self.last, "right") > np.searchsorted(rows, self.first, "left")
                groups = [(self.groups[number],) for number in np.flatnonzero(holds)] or [self.groups[:1]]
            read = _read_group if self.by == ROW else _read_table
            entries = pa.concat_tables([read(some, names, options) for some in groups], promote_options="default")
            if self.by == ROW and np.any(np.diff(entries[ROW].to_numpy()) < 0):  # a retry's rows are among the others'
                entries = entries.sort_by(ROW)
            entries = entries.combine_chunks()
        places = np.array(_places(entries[self.by], wanted), np.int64)
        return entries.select(self.columns).take(pa.array(places, mask=places < 0)), places >= 0


def open_tables(
    key: str, sections: Sequence[JoinedTable], texts: Collection[str], scores: Collection[str], options: StorageOptions
) -> tuple[Joined, ...]:
    """Open a configuration's tables for columns of texts and scores, by their footers; errors begin with `key`."""
    return tuple(_open(f"{key}.{number}", section, texts, scores, options) for number, section in enumerate(sections))


def contents_of(tables: Sequence[Joined]) -> list[dict[str, Any]]:
    """Return what identifies tables, wherever they are."""
    return [{"by": table.by, "drop": table.drop, "files": table.digest} for table in tables]


def _open(
    key: str, section: JoinedTable, texts: Collection[str], scores: Collection[str], options: StorageOptions
) -> Joined:
    files = list_source(section.uri, options)
    columns: tuple[str, ...] = ()
    spans: list[tuple[int, int, RowGroup]] = []
    attempts: dict[int, list[tuple[int, int, RowGroup]]] = {}
    statistics = ROW if section.by == ROW else ""
    footers = ordered_map(lambda file: read_new_footer(file.uri, options, statistics), files, workers=16)
    for file, footer in zip(files, footers, strict=True):
        schema = footer.schema.to_arrow_schema()
        if file is files[0]:
            columns = tuple(name for name in (*texts, *scores) if name in schema.names and name != section.by)
            if not columns and section.missing == "keep":
                raise DatasetError(
                    f"{key}.uri: no column {' or '.join([*texts, *scores])} in {file.uri}; it has "
                    f"{', '.join(schema.names)}; name one in source.caption_column or filters, or set missing: drop"
                )
        check_column(f"{key}.by", section.by, "whole numbers" if section.by == ROW else "text", schema, file.uri)
        for name in columns:
            check_column(f"{key}.uri", name, "numbers" if name in scores else "text", schema, file.uri)
        of_file = _spans(key, file.uri, footer, section.by)
        attempts.setdefault(attempt_of(footer), []).extend(of_file)
        spans += of_file
    spans.sort(key=lambda span: span[:2])
    groups = tuple(group for _, _, group in spans)
    joined = Joined(
        section.uri, section.by, section.missing == "drop", columns, groups,
        np.array([first for first, _, _ in spans], np.int64), np.array([last for _, last, _ in spans], np.int64),
        _digest(files, options),
    )  # fmt: skip
    if not groups:
        raise DatasetError(f"{key}.uri: {section.uri} has no rows; check the URI")
    if section.by == ROW:
        ordered = (pairwise(sorted(each, key=lambda span: span[:2])) for each in attempts.values())
        for (_, last, group), (first, _, after) in chain.from_iterable(ordered):
            if first <= last:
                raise DatasetError(
                    f"{key}.uri: {section.uri}: not sorted by row: {first} is within row group {group.number} of "
                    f"{group.uri} and in {after.number} of {after.uri}; sort the table by row and write it again"
                )
    else:
        _check_keys(key, joined, options)
    return joined


def check_column(key: str, name: str, content: str, schema: pa.Schema, uri: str) -> None:
    """Refuse a file that has no such column, or one that holds something else; errors begin with `key`."""
    if name not in schema.names:
        raise DatasetError(f"{key}: no column {name} in {uri}; it has {', '.join(schema.names)}")
    if schema.names.count(name) > 1:
        raise DatasetError(f"{key}: {uri} has {schema.names.count(name)} columns {name}; write it again")
    kind = schema.field(name).type
    if not _FITS[content](kind):
        raise DatasetError(f"{key}: expected a column of {content}, but {name} in {uri} is of {kind}")


def _holds_images(kind: pa.DataType) -> bool:
    """Return whether a type is bytes, or the Hugging Face hub's struct of bytes and path."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_images(kind.field("bytes").type)
    return kind_of(kind) == "bytes" and not pa.types.is_dictionary(kind)


_FITS: dict[str, Callable[[pa.DataType], bool]] = {
    "bytes": _holds_images,
    "text": lambda kind: kind_of(kind) in ("text", "bytes", "null"),
    "numbers": lambda kind: kind_of(kind) in ("numbers", "null"),
    "whole numbers": pa.types.is_integer,
}
"""The types of columns, by what they must hold."""


def _spans(key: str, uri: str, footer: pq.FileMetaData, by: str) -> list[tuple[int, int, RowGroup]]:
    """Return a file's row groups, with their lowest and highest addresses if the table is joined by them."""
    spans = []
    at = next(n for n in range(footer.num_columns) if footer.schema.column(n).path.partition(".")[0] == by)
    for number in range(footer.num_row_groups):
        if not (rows := footer.row_group(number).num_rows):
            continue
        first = last = 0
        if by == ROW:
            statistics = footer.row_group(number).column(at).statistics
            if statistics is None or not statistics.has_min_max:
                raise DatasetError(f"{key}.uri: {uri}: no statistics of column row; write it with statistics")
            first, last = statistics.min, statistics.max
            if not 0 <= first <= last < 1 << 63:
                raise DatasetError(
                    f"{key}.uri: {uri}: row {first} to {last}: expected addresses; join by another column"
                )
        spans.append((first, last, RowGroup(uri, number, rows, None)))
    return spans


def _check_keys(key: str, joined: Joined, options: StorageOptions) -> None:
    if joined.rows > MOST_ROWS:
        raise DatasetError(
            f"{key}.by: {joined.uri} has {joined.rows:,} rows, but by {joined.by} a table may have {MOST_ROWS:,}, "
            "since every worker holds it; join it by row"
        )
    keys = _sorted(joined.groups, (joined.by,), options)[joined.by]
    if not len(keys):  # all are null
        raise DatasetError(f"{key}.by: {joined.uri} has no value in column {joined.by}; join it by another")
    if (distinct := pc.count_distinct(keys).as_py()) < len(keys):
        raise DatasetError(
            f"{key}.by: {len(keys) - distinct:,} of {joined.uri}'s rows repeat another's {joined.by}; keep one of each"
        )


def _digest(files: Sequence[SourceFile], options: StorageOptions) -> str:
    """Return a digest of sizes and etags; of a local file, a sample of its content replaces its modification time."""
    versions = []
    for file, sampled in zip(files, ordered_map(lambda file: with_sample(file, options), files), strict=True):
        content = str(sampled.etag) if sampled is file else str(sampled.etag).rpartition("-")[2]
        versions.append(f"{file.size} {content}")
    return hashlib.sha256("\n".join(sorted(versions)).encode()).hexdigest()[:16]


def _sorted(groups: tuple[RowGroup, ...], names: tuple[str, ...], options: StorageOptions | None) -> pa.Table:
    """Return some row groups, sorted by their first column, the key."""
    tables = [table.select(names) for group in groups for table in read_rows((group, 0, group.rows), names, options)]
    plain = [pa.table([_plain(table[name], name) for name in names], names) for table in tables]
    table = pa.concat_tables(plain, promote_options="default")  # a file without any value has a column of nulls
    table = table.filter(table[0].is_valid()).sort_by(names[0]).combine_chunks()
    if names[0] == ROW and np.any(np.diff(table[0].to_numpy()) == 0):
        raise DatasetError(f"{groups[0].uri}: row group {groups[0].number} names a row twice; keep one of each")
    return table


_read_group, _read_table = lru_cache(maxsize=_CACHED)(_sorted), lru_cache(maxsize=None)(_sorted)


def _places(have: pa.ChunkedArray, wanted: pa.ChunkedArray) -> list[int]:
    """Return where the keys of some rows are among sorted keys; -1 where they are not."""
    # A binary search takes no memory, and its time depends on the rows wanted rather than on the table's.
    places = []
    for key in wanted.to_pylist():
        at = len(have) if key is None else bisect_left(range(len(have)), key, key=lambda n: have[n].as_py())
        places.append(at if at < len(have) and have[at].as_py() == key else -1)
    return places


def _plain(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Return a column in one type of its kind: int64 for addresses, bytes for text, float64 for numbers, or nulls."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if name == ROW:
        return column.cast(pa.int64())
    if pa.types.is_null(column.type):
        return column
    return column.cast(pa.float64() if kind_of(column.type) == "numbers" else pa.large_binary(), safe=False)
