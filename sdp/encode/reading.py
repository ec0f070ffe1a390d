"""Reading the source: units cut into pieces, and the rows of a piece.

A piece is a few row groups of the source's files, so that nothing is read twice. Where a row group is larger than a
piece, several pieces share it, and a process that reads some of them goes through it once. An image file counts as a
row group of one row; a unit's samples in a tar count as one row group.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sdp.datasets.columns import LARGEST_CELL, cut, open_parquet, read_footer, row_stops, rows_a_batch
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.index import Index
from sdp.datasets.manifest import Dataset
from sdp.datasets.scores import Score
from sdp.datasets.units import Work
from sdp.encode.chunk import SourceRow
from sdp.encode.recipe import draw
from sdp.encode.tars import LARGEST_IMAGE, LARGEST_TEXT, PICTURES, TEXT, RawSample, read_samples
from sdp.errors import DatasetError, NotFound, one_line
from sdp.hardware import usable_cores
from sdp.storage import StorageOptions, open_source

if TYPE_CHECKING:
    from sdp.encode.joined import Joined

TAR = ".tar"
FILE = "file"
"""The column of image files' names, by which tables may be joined."""
_FILES_AT_ONCE = 16
_FOOTERS = 64
_FEW = 32
"""Largest piece, in rows, that is cut straight into single rows."""
_AHEAD_BYTES = 8 << 20
"""The largest picture in a folder that is read ahead, with _FILES_AT_ONCE others and as many that wait."""
_TABLE_BYTES = 32 << 20
"""Bytes of a tar after which a table of its samples ends, so that no piece is in memory whole."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a source's file."""

    uri: str
    number: int
    """The row group's number in a Parquet file; the first sample's number in a tar."""
    rows: int
    first_row: int | None
    """Address of its first row, if addresses are consecutive; else they are in the column `row`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a unit that travel together: `take` rows of the row groups, after the first `skip`."""

    work: Work
    order: int
    """Position in the unit."""
    groups: tuple[RowGroup, ...]
    skip: int
    take: int

    def cut(self, count: int) -> "list[Piece]":
        """Return the same rows in about `count` pieces."""
        size = max(1, -(-self.take // count))
        return [replace(self, skip=self.skip + at, take=min(size, self.take - at)) for at in range(0, self.take, size)]

    def narrow(self) -> "list[Piece]":
        """Return the same rows in smaller pieces, to find the one that kills its worker."""
        # By the square root rather than in halves: each level costs two more workers.
        return self.cut(self.take if self.take <= _FEW else math.isqrt(self.take))


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the source's columns."""

    image: str = "image"
    caption: str = "caption"
    """In tars, the field of a sample's JSON."""
    text: str | None = None
    """One caption for all rows, in place of their own."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Several columns of captions, of which each row draws one, in place of `caption`."""
    tables: "tuple[Joined, ...]" = ()
    """Tables whose columns take the place of the source's own; where two have a value, the later one's is used."""
    scores: tuple[Score, ...] = ()
    """The bounds within which rows are used."""
    folder: str = ""
    """The folder of image files; FILE is a file's name below it."""

    @property
    def captions(self) -> tuple[str, ...]:
        """The columns of captions, in an order that no file decides."""
        return tuple(sorted(self.weights)) or (self.caption,)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read, of which the source may lack some."""
        return ("key", self.image, *self.captions, *self.keys, *self.numbers)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns of scores."""
        return tuple(score.column for score in self.scores)

    @property
    def joined(self) -> frozenset[str]:
        """The columns that tables have."""
        return frozenset(name for table in self.tables for name in table.columns)

    @property
    def keys(self) -> tuple[str, ...]:
        """The source's columns by which tables are joined."""
        return tuple(table.by for table in self.tables if table.by != "row")

    @property
    def leave_out(self) -> bool:
        """True if tables or filters may leave out rows."""
        return bool(self.scores) or any(table.drop for table in self.tables)


class Planner:
    """Cuts units into pieces by the index and the manifest; reads footers where the source is plain Parquet."""

    def __init__(
        self, index: Index, upstream: Dataset | None, piece_rows: int, options: StorageOptions | None = None
    ) -> None:
        self._index, self._upstream, self._piece_rows, self._options = index, upstream, piece_rows, options
        # There may be millions of row groups, so they stay in Arrow until they are needed.
        paths = upstream.parts["path"].to_pylist() if upstream else []
        self._position = {path: position for position, path in enumerate(paths)}

    def __call__(self, work: Work) -> list[Piece]:
        """Return the pieces of a unit; none if upstream has no rows for it."""
        batches: list[list[_Span]] = []
        for group in self._row_groups(work):
            span = _within(group, work)
            rows = _rows_in([span])
            if batches and _rows_in(batches[-1]) + rows <= self._piece_rows:
                batches[-1].append(span)
            elif rows:
                batches.append([span])
        pieces = []
        for order, spans in enumerate(batches):
            groups, rows = tuple(group for group, _, _ in spans), _rows_in(spans)
            pieces += Piece(work, order, groups, spans[0][1], rows).cut(-(-rows // self._piece_rows))
        return pieces

    def _row_groups(self, work: Work) -> Iterator[RowGroup]:
        if self._upstream is not None:
            for path in self._index.parts_of(work):
                if (position := self._position.get(path)) is not None:  # otherwise the manifest does not list it
                    uri = self._upstream.storage.uri_of(path)
                    for number, group in enumerate(self._upstream.parts["row_groups"][position].as_py()):
                        yield RowGroup(uri, number, group["rows"], None)
            return
        for piece in self._index.slices(work.unit.start, work.unit.stop):
            if piece.path.lower().endswith((TAR, *PICTURES)):
                yield RowGroup(piece.path, piece.offset, piece.length, piece.first_row)
                continue
            stops, first = _stops_in(piece.path, self._options), piece.first_row - piece.offset
            number = int(np.searchsorted(stops, work.unit.start - first, "right"))
            while number < len(stops) and (at := int(stops[number - 1]) if number else 0) < work.unit.stop - first:
                yield RowGroup(piece.path, number, int(stops[number]) - at, first + at)
                number += 1


def read_piece(
    piece: Piece,
    columns: Columns,
    *,
    options: StorageOptions | None = None,
    only: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> Iterator[SourceRow]:
    """Yield the rows of a piece that belong to its unit and, if given, to `only`; read a row group at a time.

    The seed, with a row's address, chooses among several captions.
    """
    # Read ahead while the caller works: one row group, or several image files, which are small.
    workers = _FILES_AT_ONCE if piece.groups[0].uri.lower().endswith(PICTURES) else 1

    def select(table: pa.Table, rows: NDArray[np.int64]) -> tuple[pa.Table, NDArray[np.int64], list[str]]:
        """Return the wanted rows with their tables' columns, and the reason to leave each out, if there is one."""
        selected = (rows >= piece.work.unit.start) & (rows < piece.work.unit.stop)
        if only is not None:
            selected &= np.isin(rows, only)
        if not selected.all():
            table, rows = table.filter(pa.array(selected)), rows[selected]
        filtered = np.full(len(rows), "", object)
        if len(rows):
            for joined in columns.tables:
                table, present = joined.join(table, rows, options)
                filtered[~present & joined.drop & (filtered == "")] = "not_in_table"
            for score in columns.scores:
                filtered[score.mask(table) & (filtered == "")] = score.reason
        return table, rows, filtered.tolist()

    def read(span: _Span) -> Iterable[tuple[pa.Table, NDArray[np.int64], list[str]]]:
        tables = _tables(span, columns, options)
        ahead = list(islice(tables, 1))
        return starmap(select, filter(None, chain(ahead, tables)))

    for tables in ordered_map(read, _spans(piece), workers):
        for table, rows, filtered in tables:
            yield from _rows_of(table, rows, filtered, columns, seed)


def addresses(piece: Piece, options: StorageOptions | None = None) -> NDArray[np.int64]:
    """Return the addresses of a piece, without reading its images."""
    rows = np.concatenate([rows for span in _spans(piece) for rows in _rows_of_span(span, options)])
    unit = piece.work.unit
    return rows[(rows >= unit.start) & (rows < unit.stop)]


_Span = tuple[RowGroup, int, int]
"""Rows of a row group: from the first number, up to the second."""


def _within(group: RowGroup, work: Work) -> _Span:
    """Return the rows of a row group that may belong to a unit."""
    if group.first_row is None:
        return group, 0, group.rows
    unit = work.unit
    return group, max(0, unit.start - group.first_row), min(group.rows, unit.stop - group.first_row)


def _rows_in(spans: Sequence[_Span]) -> int:
    return sum(max(0, stop - start) for _, start, stop in spans)


def _spans(piece: Piece) -> Iterator[_Span]:
    """Yield (row group, start, stop) of a piece's rows."""
    at = 0
    for group in piece.groups:
        start, stop = max(0, piece.skip - at), min(group.rows, piece.skip + piece.take - at)
        at += group.rows
        if start < stop:
            yield group, start, stop


def _rows_of(
    table: pa.Table, rows: NDArray[np.int64], filtered: Sequence[str], columns: Columns, seed: int
) -> Iterator[SourceRow]:
    keys, *captions = (
        table[name] if name in table.column_names else [None] * len(rows) for name in ("key", *columns.captions)
    )
    images = _images(table[columns.image])
    for row, key, image, reason, *cells in zip(rows.tolist(), keys, images, filtered, *captions, strict=True):
        text = _choose(row, [_text(cell) for cell in cells], columns, seed) if columns.text is None else columns.text
        yield SourceRow(row, _text(key) or f"{row:012d}", image, text, reason)


def _choose(row: int, captions: Sequence[str | None], columns: Columns, seed: int) -> str | None:
    """Return a row's caption: its only one, or the one that it draws among those that are not empty."""
    if not columns.weights:
        return captions[0]
    present = [(text, columns.weights[name]) for name, text in zip(columns.captions, captions, strict=True) if text]
    present = [(text, weight) for text, weight in present if text.strip()]
    return present[draw(seed, row, [weight for _, weight in present])][0] if present else None


def _images(column: pa.ChunkedArray) -> Iterator[memoryview | None]:
    """Yield views of images' bytes, which the Hugging Face hub's datasets keep in a struct of bytes and path."""
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, "bytes")
    for chunk in column.chunks:
        if isinstance(chunk, pa.DictionaryArray):
            places, chunk = chunk.indices, chunk.dictionary
        else:
            places = pc.if_else(chunk.is_valid(), pa.array(range(len(chunk)), pa.int64()), None)
        chunk = chunk.cast(pa.binary())
        _, edges, data = chunk.buffers()
        edges, view = memoryview(edges or b"").cast("i")[chunk.offset :], memoryview(data or b"")
        for place in places.to_pylist():
            yield None if place is None else view[edges[place] : edges[place + 1]]


def _text(value: pa.Scalar | None) -> str | None:
    """Return the text of a cell, which may hold bytes; None if it has no valid one."""
    if value is None or not value.is_valid:
        return None
    try:
        text = value.as_py()
        return (text.decode() if isinstance(text, bytes) else str(text))[:LARGEST_CELL]
    except (ValueError, OverflowError):  # Parquet's readers check neither that text is UTF-8 nor that a date exists
        return None


def _rows_of_span(span: _Span, options: StorageOptions | None) -> Iterator[NDArray[np.int64]]:
    """Yield the addresses of a span, without reading its images."""
    group, start, stop = span
    if group.first_row is not None:
        yield np.arange(group.first_row + start, group.first_row + stop, dtype=np.int64)
        return
    for table in read_rows(span, ("row",), options):
        yield table["row"].to_numpy()


def _tables(
    span: _Span, columns: Columns, options: StorageOptions | None
) -> Iterator[tuple[pa.Table, NDArray[np.int64]] | None]:
    """Yield a span's rows in tables of bounded size, with their addresses; the next is read when it is asked for.

    The first, which is read ahead, is None in place of a large picture.
    """
    group, start, _ = span
    if group.first_row is None:
        for table in read_rows(span, ("row", *columns.names), options, columns.image):
            yield table, table["row"].to_numpy()
        return
    if group.uri.lower().endswith(PICTURES):
        source = open_source(group.uri, options)
        if source.size() > _AHEAD_BYTES:
            yield None
        table = _sample_table([_picture(group.uri, source, columns, options)], columns)
        if FILE in columns.keys:
            table = table.append_column(FILE, pa.array([group.uri.removeprefix(f"{columns.folder}/")]))
        yield table, np.array([group.first_row])
    elif group.uri.lower().endswith(TAR):
        yield from _tar_tables(span, columns, options)
    else:
        row = group.first_row + start
        for table in read_rows(span, columns.names, options, columns.image):
            yield table, np.arange(row, row + table.num_rows, dtype=np.int64)
            row += table.num_rows


def _tar_tables(
    span: _Span, columns: Columns, options: StorageOptions | None
) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
    """Yield a tar's samples in tables of bounded size, with their addresses."""
    group, start, stop = span
    assert group.first_row is not None
    samples = read_samples(group.uri, columns.caption, group.number + start, group.number + stop, options)
    row = group.first_row + start
    while batch := list(_up_to(_TABLE_BYTES, samples)):
        yield _sample_table(batch, columns), np.arange(row, row + len(batch), dtype=np.int64)
        row += len(batch)
    if row != group.first_row + stop:
        raise DatasetError(f"{group.uri}: changed while it was read; run the job again")


def _up_to(size: int, samples: Iterator[RawSample]) -> Iterator[RawSample]:
    """Yield samples until they have this many bytes."""
    while size > 0 and (sample := next(samples, None)) is not None:
        size -= sum(len(value or b"") for value in sample)
        yield sample


def _sample_table(samples: Sequence[RawSample], columns: Columns) -> pa.Table:
    kinds = (pa.string(), pa.binary(), pa.string())
    values = [pa.array(column, kind) for column, kind in zip(zip(*samples, strict=True), kinds, strict=True)]
    return pa.table(values, ("key", columns.image, columns.caption))


def _picture(uri: str, source: pa.NativeFile, columns: Columns, options: StorageOptions | None) -> RawSample:
    stem, caption = uri.rpartition(".")[0], None
    if columns.text is None:
        with suppress(NotFound):
            caption = open_source(f"{stem}{TEXT}", options).read(LARGEST_TEXT).decode("utf-8", "replace").strip()
    return stem.rpartition("/")[2], source.read(LARGEST_IMAGE), caption


_unfinished: "dict[tuple[tuple[object, ...], int], _Reader]" = {}
"""Readers of the row group of which this process has last read a part, by the group and the rows that they have passed.
Each holds the group's bytes in the file, and threads that read one group, one for each core, need a reader each."""


def read_rows(
    span: _Span, columns: Sequence[str], options: StorageOptions | None, image: str | None = None
) -> Iterator[pa.Table]:
    """Yield those of the columns that exist, with text cut; go on where the last part of the row group has ended."""
    group, start, stop = span
    key = (group, tuple(columns), options, image)
    passed = [at for of, at in list(_unfinished) if of == key and at <= start]
    reader = _unfinished.pop((key, max(passed)), None) if passed else None
    try:
        reader = reader or _Reader(group, columns, options, image)
        yield from reader.read(start, stop)
    except (pa.ArrowException, OSError) as error:
        cause = one_line(error, 160)
        raise DatasetError(f"{group.uri}: corrupt row group {group.number} ({cause}); make the file again") from error
    if stop < group.rows:
        _unfinished[key, stop] = reader
    others = [held for held in list(_unfinished) if held[0] != key]
    for needless in others or list(_unfinished)[: -usable_cores()]:
        _unfinished.pop(needless, None)


class _Reader:
    """Reads a row group from its beginning to its end, a batch of bounded size at a time."""

    def __init__(self, group: RowGroup, columns: Sequence[str], options: StorageOptions | None, image: str | None):
        self.at = 0
        """The number of rows that have been returned or passed over."""
        self._group, self._image = group, image
        footer = footer_of(group.uri, options)
        file = open_parquet(
            open_source(group.uri, options), columns, footer, pre_buffer=True, page_checksum_verification=True
        )
        names = [name for name in footer.schema.to_arrow_schema().names if name in columns]
        rows = rows_a_batch(footer, [group.number])
        self._batches = file.iter_batches(rows, row_groups=[group.number], columns=names, use_threads=False)
        self._rest = file.schema_arrow.empty_table().select(names)

    def read(self, start: int, stop: int) -> Iterator[pa.Table]:
        while self.at < stop:
            if not self._rest.num_rows:
                batch = next(self._batches, None)
                if batch is None:
                    raise DatasetError(f"{self._group.uri}: changed while it was read; run the job again")
                self._rest = cut(pa.Table.from_batches([batch]), self._image)
            rows = min(self._rest.num_rows, (stop if self.at >= start else min(start, stop)) - self.at)
            table, wanted = self._rest.slice(0, rows), self.at >= start
            self.at, self._rest = self.at + rows, self._rest.slice(rows)
            if wanted:
                yield table


footer_of = lru_cache(maxsize=_FOOTERS)(read_footer)
"""Remembers footers, since a file's pieces are read one after another."""


@lru_cache(maxsize=_FOOTERS)
def _stops_in(uri: str, options: StorageOptions | None) -> NDArray[np.int64]:
    """Return for each row group of a file the number of rows up to its end."""
    return row_stops(footer_of(uri, options))
