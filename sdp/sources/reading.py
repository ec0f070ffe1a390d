"""The rows of a piece, with their captions, and which of them tables and filters leave out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, starmap

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sdp.datasets.columns import LARGEST_CELL
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.draws import LINE, draw
from sdp.datasets.scores import Score
from sdp.datasets.units import Addresses
from sdp.errors import DatasetError, NotFound
from sdp.sources.groups import GroupRows, read_rows
from sdp.sources.joined import Joined
from sdp.sources.pieces import TAR, Piece, spans_of
from sdp.sources.tars import LARGEST_IMAGE, LARGEST_TEXT, PICTURES, TEXT, RawSample, decoded, read_samples
from sdp.storage import StorageOptions, open_source
from sdp.storage.uri import below

FILE = "file"
"""The column of image files' names, by which tables may be joined."""
_FILES_AT_ONCE = 16
_AHEAD_BYTES = 8 << 20
"""The largest picture in a folder that is read ahead, with _FILES_AT_ONCE others and as many that wait."""
_TABLE_BYTES = 32 << 20
"""Bytes of a tar after which a table of its samples ends, so that no piece is in memory whole."""

Addressed = tuple[pa.Table, Addresses]
"""A table of rows, and their addresses."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of the source."""

    row: int
    key: str
    image: bytes | memoryview | None
    caption: str | None
    filtered: str = ""
    """The reason to leave the row out, if there is one."""


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
    tables: tuple[Joined, ...] = ()
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


def read_piece(
    piece: Piece,
    columns: Columns,
    *,
    options: StorageOptions | None = None,
    only: Addresses | None = None,
    seed: int = 0,
) -> Iterator[SourceRow]:
    """Yield the rows of a piece that belong to its unit and, if given, to `only`; read a row group at a time.

    The seed, with a row's address, chooses among several captions, and among the lines beside a picture.
    """
    # Read ahead while the caller works: one row group, or several image files, which are small.
    workers = _FILES_AT_ONCE if piece.groups[0].uri.lower().endswith(PICTURES) else 1

    def select(table: pa.Table, rows: Addresses) -> tuple[pa.Table, Addresses, list[str]]:
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

    def read(span: GroupRows) -> Iterable[tuple[pa.Table, Addresses, list[str]]]:
        tables = _tables(span, columns, options, seed)
        ahead = list(islice(tables, 1))
        return starmap(select, filter(None, chain(ahead, tables)))

    for tables in ordered_map(read, spans_of(piece), workers):
        for table, rows, filtered in tables:
            yield from _rows_of(table, rows, filtered, columns, seed)


def addresses(piece: Piece, options: StorageOptions | None = None) -> Addresses:
    """Return the addresses of a piece, without reading its images."""
    rows = np.concatenate([rows for span in spans_of(piece) for rows in _rows_of_span(span, options)])
    unit = piece.work.unit
    return rows[(rows >= unit.start) & (rows < unit.stop)]


def _rows_of(table: pa.Table, rows: Addresses, filtered: list[str], columns: Columns, seed: int) -> Iterator[SourceRow]:
    names = ("key", *columns.captions)
    keys, *captions = (table[name] if name in table.column_names else [None] * len(rows) for name in names)
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
            positions, values = chunk.indices, chunk.dictionary
        else:
            positions = pc.if_else(chunk.is_valid(), pa.array(range(len(chunk)), pa.int64()), None)
            values = chunk
        values = values.cast(pa.binary())
        _, offsets, data = values.buffers()
        starts, view = memoryview(offsets or b"").cast("i")[values.offset :], memoryview(data or b"")
        for position in positions.to_pylist():  # None for a null
            yield None if position is None else view[starts[position] : starts[position + 1]]


def _text(value: pa.Scalar | None) -> str | None:
    """Return the text of a cell, which may hold bytes; None if it has no valid one."""
    if value is None or not value.is_valid:
        return None
    try:
        text = value.as_py()
        return (text.decode() if isinstance(text, bytes) else str(text))[:LARGEST_CELL]
    except (ValueError, OverflowError):  # Parquet's readers check neither that text is UTF-8 nor that a date exists
        return None


def _rows_of_span(span: GroupRows, options: StorageOptions | None) -> Iterator[Addresses]:
    """Yield the addresses of a span, without reading its images."""
    group, start, stop = span
    if group.first_row is not None:
        yield np.arange(group.first_row + start, group.first_row + stop, dtype=np.int64)
        return
    for table in read_rows(span, ("row",), options):
        yield table["row"].to_numpy()


def _tables(span: GroupRows, columns: Columns, options: StorageOptions | None, seed: int) -> Iterator[Addressed | None]:
    """Yield a span's rows in tables of bounded size, with their addresses; the next is read when it is asked for.

    The first, which is read ahead, is None in place of a large picture.
    """
    group, start, _ = span
    if group.first_row is None:
        for table in read_rows(span, ("row", *columns.names), options, columns.image):
            yield table, table["row"].to_numpy()
        return
    if group.uri.lower().endswith(PICTURES):
        sample: RawSample = ("", None, None)
        with suppress(NotFound):  # deleted since it was listed: a row without an image
            source = open_source(group.uri, options)
            if source.size() > _AHEAD_BYTES:
                yield None
            key, image, lines = _picture(group.uri, source, columns, options)
            sample = key, image, lines[draw(seed, group.first_row, [1.0] * len(lines), LINE)] if lines else None
        table = _sample_table([sample], columns)
        if FILE in columns.keys:
            table = table.append_column(FILE, pa.array([below(group.uri, columns.folder)]))
        yield table, np.array([group.first_row])
    elif group.uri.lower().endswith(TAR):
        yield from _tar_tables(span, columns, options)
    else:
        row = group.first_row + start
        for table in read_rows(span, columns.names, options, columns.image):
            yield table, np.arange(row, row + table.num_rows, dtype=np.int64)
            row += table.num_rows


def _tar_tables(span: GroupRows, columns: Columns, options: StorageOptions | None) -> Iterator[Addressed]:
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


def stem_of(file: str) -> str:
    """Return what the name of a picture and of the text beside it share."""
    return file.rpartition(".")[0]


def captions_in(text: str) -> list[str]:
    """Return the captions of a text beside a picture: its lines."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _picture(
    uri: str, source: pa.NativeFile, columns: Columns, options: StorageOptions | None
) -> tuple[str, bytes, list[str]]:
    stem, captions = stem_of(uri), list[str]()
    if columns.text is None:
        with suppress(NotFound):
            captions = captions_in(decoded(open_source(f"{stem}{TEXT}", options).read(LARGEST_TEXT)))
    return stem.rpartition("/")[2], source.read(LARGEST_IMAGE), captions
