"""Runs of units that are read from the source together."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.datasets.index import FileSlice, Index
from sdp.datasets.outcomes import FAILED
from sdp.datasets.parts import read_account, resolve
from sdp.datasets.units import Rows, Work, part_name
from sdp.download.columns import plain
from sdp.download.unit import UnitTask
from sdp.errors import DatasetError, one_line
from sdp.storage import Storage, StorageOptions, open_source

_MOST_UNITS = 16
_SPANS_A_WORKER = 8
_BATCH_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Span:
    """Works of one attempt with consecutive units, and the places of their rows."""

    works: tuple[Work, ...]
    slices: tuple[FileSlice, ...]
    earlier: tuple[tuple[str, ...], ...] = ()
    """For each work of a retry, the parts of its earlier attempts."""


def spans(index: Index, pending: Sequence[Work], workers: int, seed: int = 0) -> list[Span]:
    """Group pending works into runs, shuffled so that workers do not all fetch neighbours in the source at once."""
    longest = max(1, min(_MOST_UNITS, len(pending) // (_SPANS_A_WORKER * workers)))
    runs: list[list[Work]] = []
    for work in sorted(pending, key=lambda w: (w.attempt, w.unit.number)):
        last = runs[-1] if runs else None
        follows = last and last[-1].attempt == work.attempt and last[-1].unit.stop == work.unit.start
        if last and follows and len(last) < longest:
            last.append(work)
        else:
            runs.append([work])
    attempts: dict[int, list[int]] = {}
    for work in index.works():
        attempts.setdefault(work.unit.number, []).append(work.attempt)
    random.Random(seed).shuffle(runs)
    return [_span(index, run, attempts) for run in runs]


def read_span(
    span: Span, columns: Sequence[str], output: Storage, options: StorageOptions | None = None
) -> Iterator[UnitTask]:
    """Yield the tasks of a span, each with its rows of the source, as soon as they are read."""
    tables = iter_units([work.unit.stop - work.unit.start for work in span.works], span.slices, columns, options)
    for number, (work, table) in enumerate(zip(span.works, tables, strict=True)):
        rows: Rows = np.arange(work.unit.start, work.unit.stop, dtype=np.int64)
        if not work.attempt:
            yield UnitTask(work, rows, table)
            continue
        account = resolve([read_account(output, path) for path in span.earlier[number]])
        failed = account.filter(pc.field("outcome") == FAILED)
        rows = np.asarray(failed["row"].to_numpy(), dtype=np.int64)
        retried = dict(Counter(failed["reason"].to_pylist()))
        yield UnitTask(work, rows, table.take(pa.array(rows - work.unit.start)), retried)


def iter_units(
    lengths: Sequence[int], slices: Sequence[FileSlice], columns: Sequence[str], options: StorageOptions | None = None
) -> Iterator[pa.Table]:
    """Read the rows of consecutive slices into tables of these lengths."""
    batches = _batches(slices, columns, options)
    waiting: list[pa.Table] = []
    have, empty = 0, pa.table({name: pa.nulls(0) for name in columns})
    for length in lengths:
        while have < length:
            table = next(batches)
            waiting.append(table)
            have += table.num_rows
        try:
            joined = pa.concat_tables(waiting, promote_options="permissive") if waiting else empty
        except pa.ArrowException as error:  # files that different runs added, whose types have not been compared
            cause = one_line(error, 120)
            raise DatasetError(
                f"source.uri: files whose columns differ in type ({cause}); convert one of the files"
            ) from error
        yield joined.slice(0, length).combine_chunks()
        waiting, have = [joined.slice(length)], have - length


def _batches(slices: Sequence[FileSlice], columns: Sequence[str], options: StorageOptions | None) -> Iterator[pa.Table]:
    for piece in slices:
        try:
            file = pq.ParquetFile(open_source(piece.path, options))
            groups, skip = _groups(file.metadata, piece.offset, piece.length)
            left = piece.length
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=list(columns)):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                batch = batch.slice(skip, left)
                skip, left = 0, left - batch.num_rows
                yield plain(pa.Table.from_batches([batch]).select(list(columns)))
                if not left:
                    break
        except (pa.ArrowException, OSError) as error:
            cause = one_line(error, 160)
            raise DatasetError(
                f"{piece.path}: cannot be read ({cause}); fix or restore this file of source.uri"
            ) from error
        if left:
            raise DatasetError(f"{piece.path}: {left} rows fewer than before; restore it, or choose a new output.uri")


def _groups(footer: pq.FileMetaData, offset: int, length: int) -> tuple[list[int], int]:
    """Return the row groups that hold these rows, and the number of rows to skip in the first."""
    groups: list[int] = []
    before = skip = 0
    for number in range(footer.num_row_groups):
        rows = footer.row_group(number).num_rows
        if before + rows > offset and before < offset + length:
            if not groups:
                skip = offset - before
            groups.append(number)
        before += rows
    return groups, skip


def _span(index: Index, run: Sequence[Work], attempts: dict[int, list[int]]) -> Span:
    slices = index.slices(run[0].unit.start, run[-1].unit.stop)
    earlier = tuple(
        tuple(part_name(w.unit.number, a) for a in attempts[w.unit.number] if a < w.attempt) for w in run if w.attempt
    )
    return Span(tuple(run), tuple(slices), earlier)
