"""Runs of units that are read from the source together."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sdp.datasets.columns import cast, groups_within, iter_tables, open_parquet, row_stops
from sdp.datasets.index import FileSlice, Index
from sdp.datasets.parts import failed_before
from sdp.datasets.records import reading
from sdp.datasets.units import Work
from sdp.download.unit import UnitTask
from sdp.errors import DatasetError, one_line
from sdp.storage import Storage, StorageOptions

_MOST_UNITS = 16
_SPANS_A_WORKER = 8


@dataclass(frozen=True, slots=True)
class Span:
    """Works of one attempt with consecutive units, and the places of their rows."""

    works: tuple[Work, ...]
    slices: tuple[FileSlice, ...]
    types: pa.Schema
    """The types of the columns that parts carry."""


def spans(index: Index, pending: Sequence[Work], workers: int) -> list[Span]:
    """Group pending works into runs, shuffled so that workers do not all fetch neighbours in the source at once.

    The last runs are short, so that workers end together.
    """
    runs: list[list[Work]] = []
    for done, work in enumerate(sorted(pending, key=lambda w: (w.attempt, w.unit.number))):
        last = runs[-1] if runs else None
        follows = last and last[-1].attempt == work.attempt and last[-1].unit.stop == work.unit.start
        if last and follows and len(last) < min(_MOST_UNITS, (len(pending) - done) // (_SPANS_A_WORKER * workers)):
            last.append(work)
        else:
            runs.append([work])
    random.Random(0).shuffle(runs)
    runs.sort(key=len, reverse=True)
    return [Span(tuple(run), tuple(index.slices(run[0].unit.start, run[-1].unit.stop)), index.columns) for run in runs]


def read_span(span: Span, columns: Sequence[str], output: Storage) -> Iterator[UnitTask]:
    """Yield the tasks of a span, each with its rows of the source, as soon as they are read."""
    lengths = [work.unit.stop - work.unit.start for work in span.works]
    tables = iter_units(lengths, span.slices, columns, span.types, output.options)
    for work, table in zip(span.works, tables, strict=True):
        rows, retried = np.arange(work.unit.start, work.unit.stop, dtype=np.int64), dict[str, int]()
        if work.attempt:
            rows, retried = failed_before(output, work)
            table = table.take(pa.array(rows - work.unit.start))
        yield UnitTask(work, rows, table, retried)


def iter_units(
    lengths: Sequence[int],
    slices: Sequence[FileSlice],
    columns: Sequence[str],
    types: pa.Schema,
    options: StorageOptions | None = None,
) -> Iterator[pa.Table]:
    """Read the rows of consecutive slices into tables of these lengths, with some columns in these types."""
    batches = _batches(slices, columns, types, options)
    waiting, have = [pa.table({name: pa.nulls(0) for name in columns})], 0
    for length in lengths:
        while have < length:
            table = next(batches)
            waiting.append(table)
            have += table.num_rows
        try:
            joined = pa.concat_tables(waiting, promote_options="permissive")
        except pa.ArrowException as error:  # files that different runs added, whose types have not been compared
            cause = f"files whose columns differ in type ({one_line(error, 120)})"
            raise DatasetError(f"source.uri: {cause}; convert one of the files") from error
        yield joined.slice(0, length).combine_chunks()
        waiting, have = [joined.slice(length)], have - length


def _batches(
    slices: Sequence[FileSlice], columns: Sequence[str], types: pa.Schema, options: StorageOptions | None
) -> Iterator[pa.Table]:
    for piece in slices:
        with reading(piece.path, "fix or restore this file of source.uri", "cannot be read"):
            file = open_parquet(piece.path, options, columns)
            groups = groups_within(row_stops(file.metadata), piece.offset, piece.offset + piece.length)
            skip = piece.offset - groups[0][1] if groups else 0
            left = piece.length
            for table in iter_tables(file, columns, [group for group, _ in groups]):
                rows = table.slice(skip, left)
                skip = max(0, skip - table.num_rows)
                left -= rows.num_rows
                yield cast(rows, types, piece.path)
                if not left:
                    break
        if left:
            raise DatasetError(f"{piece.path}: {left} rows fewer than before; restore it, or choose a new output.uri")
