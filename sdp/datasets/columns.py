"""Columns of a source in plain types, so that a part's content does not depend on the library that wrote the source.

Arrow has several types for the same values: text may be a dictionary, a view, or have offsets of 64 bits. Not every
function accepts all of them, and files of one source may differ: whole numbers become fractions in the files where a
value is missing. The columns that parts carry have one type in all of them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sdp.datasets.pages import check_pages
from sdp.datasets.records import reading
from sdp.errors import DatasetError
from sdp.storage import StorageOptions, open_source

_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
_PLAIN = {
    **dict.fromkeys((pa.large_string(), pa.string_view()), pa.string()),
    **dict.fromkeys((pa.large_binary(), pa.binary_view()), pa.binary()),
}
"""The plain types of other text and bytes."""

LARGEST_CELL = 1 << 16
"""Bytes of a cell with text or bytes in a stranger's table. A longer cell keeps one byte more, as a mark."""
_MOST_ROWS_A_BYTE, _MOST_BYTES_A_BYTE = 1024, 32
"""Rows that a Parquet file may claim for each of its bytes, and bytes that a larger row group may become for each."""
_BATCH_ROWS, _BATCH_BYTES = 16_384, 64 << 20
_NUMBER_BYTES = 8
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
"""The end of a Parquet file, and of one whose footer is encrypted."""
_TAIL, _SIGNATURE = 8, 28
"""Bytes of the footer's length and the magic, and of the signature of a footer that describes encrypted columns."""
_UNREADABLE = ("make it again", "not a readable Parquet file")


def table_of(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table([list(column) for column in columns], schema=schema)


def parquet_bytes(table: pa.Table, **how: Any) -> pa.Buffer:
    """Return a table as a compressed Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", **how)
    return sink.getvalue()


def read_footer(uri: str, options: StorageOptions | None) -> pq.FileMetaData:
    """Read the footer of a source's file, and check it."""
    return parse_footer(uri, *read_end(uri, options))


def read_end(uri: str, options: StorageOptions | None) -> tuple[bytes, int]:
    """Read a file's last bytes, from the beginning of its footer, and its size."""
    with reading(uri, *_UNREADABLE):
        return end_of(open_source(uri, options))


def end_of(source: pa.NativeFile) -> tuple[bytes, int]:
    """Read an open file's last bytes, from the beginning of its footer, and its size."""
    size = source.size()
    source.seek(max(0, size - _TAIL))
    tail = source.read(_TAIL)
    length = _TAIL + int.from_bytes(tail[:4], "little") if tail[4:] in (_MAGIC, _ENCRYPTED) else len(tail)
    if length > size:
        raise ValueError(f"its footer claims {length - _TAIL:,} bytes of {size:,}")
    source.seek(size - length)
    return source.read(length), size


def parse_footer(uri: str, end: bytes, size: int) -> pq.FileMetaData:
    """Return the footer in a file's last bytes; refuse one of encrypted columns, and one that contradicts itself."""
    with reading(uri, *_UNREADABLE):
        footer = plain_footer(uri, end)
        rows_by_group(footer, uri, size)
        return footer


def plain_footer(uri: str, end: bytes) -> pq.FileMetaData:
    """Return the footer in a file's last bytes; refuse one of encrypted columns."""
    footer = pq.read_metadata(pa.BufferReader(end)) if not end.endswith(_ENCRYPTED) else None
    # Parquet's library ends the process that asks for an encrypted column, even for its length.
    if footer is None or footer.serialized_size + _SIGNATURE == len(end) - _TAIL:
        raise DatasetError(f"{uri}: it is encrypted; remove the file or write it again without encryption")
    return footer


def rows_by_group(footer: pq.FileMetaData, uri: str, size: int) -> list[int]:
    """Return the number of rows in each row group; refuse a footer that contradicts itself or the file's size."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    counts = [group.num_rows for group in groups]
    if min(counts, default=0) < 0 or sum(counts) != footer.num_rows or footer.num_rows > size * _MOST_ROWS_A_BYTE:
        raise DatasetError(
            f"{uri}: its footer claims {footer.num_rows:,} rows, with {sum(counts):,} in its row groups, in {size:,} "
            "bytes; remove the file or write it again"
        )
    lengths = _lengths(footer)
    for number, group in enumerate(groups):
        held = _loaded_bytes(group, lengths)
        if held > _BATCH_BYTES and held > _MOST_BYTES_A_BYTE * (stored := _stored(group)):
            raise DatasetError(
                f"{uri}: row group {number} has {stored:,} bytes that become {held:,}; remove the file or write it "
                "again without long values that repeat"
            )
    return counts


def row_stops(footer: pq.FileMetaData) -> NDArray[np.int64]:
    """Return for each row group of a file the number of rows up to its end."""
    return np.cumsum([footer.row_group(number).num_rows for number in range(footer.num_row_groups)], dtype=np.int64)


def groups_within(stops: NDArray[np.int64], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the row groups that hold some of a file's rows [start, stop), each with the number of rows before it."""
    first, last = int(np.searchsorted(stops, start, "right")), int(np.searchsorted(stops, stop, "left"))
    return [(group, int(stops[group - 1]) if group else 0) for group in range(first, min(last + 1, len(stops)))]


def _lengths(footer: pq.FileMetaData) -> list[int]:
    """Return the bytes of a value of each column; text, which may have any length, is held once where it repeats."""
    leaves = (footer.schema.column(number) for number in range(footer.num_columns))
    return [max(_NUMBER_BYTES, leaf.length) for leaf in leaves]


def _loaded_bytes(group: pq.RowGroupMetaData, lengths: Sequence[int]) -> int:
    """Return the bytes that a row group becomes, by its footer."""
    columns = list(map(group.column, range(group.num_columns)))
    values = sum(column.num_values * length for column, length in zip(columns, lengths, strict=True))
    return int(max(group.total_byte_size, sum(column.total_uncompressed_size for column in columns), values))


def _stored(group: pq.RowGroupMetaData) -> int:
    """Return the compressed bytes of a row group."""
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def open_parquet(
    uri: str,
    options: StorageOptions | None,
    columns: Collection[str],
    footer: pq.FileMetaData | None = None,
    groups: Sequence[int] | None = None,
    **how: Any,
) -> pq.ParquetFile:
    """Open a source's file, to read some columns of all row groups or of some.

    Text and bytes that some columns repeat, also in lists and structs, are held once, except where they are stored as
    differences, of which Parquet's library makes no dictionary. If pages hold more than the footer says, reading raises
    DatasetError.
    """
    source = open_source(uri, options)
    footer = footer or pq.read_metadata(source)
    leaves = [(leaf.path, leaf.physical_type) for leaf in map(footer.schema.column, range(footer.num_columns))]
    chosen = [at for at, (path, _) in enumerate(leaves) if path in columns or path.partition(".")[0] in columns]
    groups = range(footer.num_row_groups) if groups is None else groups
    texts = [at for at in chosen if leaves[at][1] == "BYTE_ARRAY"]
    differing = {at for at in texts if any(_stores_differences(footer, number, at) for number in groups)}
    if lists := [leaves[at][0] for at in differing if footer.schema.column(at).max_repetition_level]:
        raise DatasetError(f"{uri}: column {lists[0]} has lists of text in a delta encoding; write the file in another")
    repeating = [leaves[at][0] for at in texts if at not in differing]
    checked = check_pages(uri, source, footer, groups, chosen, differing)
    if differing:
        footer = _without_arrow_types(footer)
    return pq.ParquetFile(checked, metadata=footer, read_dictionary=repeating, **how)


def _stores_differences(footer: pq.FileMetaData, group: int, column: int) -> bool:
    """Return whether a row group stores a column of text as differences: of lengths, or from the value before."""
    return any(name.startswith("DELTA_") for name in footer.row_group(group).column(column).encodings)


def _without_arrow_types(footer: pq.FileMetaData) -> pq.FileMetaData:
    """Return the footer without Arrow's own schema, which would make pyarrow return text as dictionaries."""
    sink = BytesIO()
    footer.write_metadata_file(sink)
    end = sink.getvalue().replace(b"ARROW:schema", b"arrow:schema")  # a key that nobody reads
    return pq.read_metadata(pa.BufferReader(end))


def iter_batches(
    file: pq.ParquetFile, columns: Sequence[str], groups: Sequence[int], **how: Any
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of some row groups of an open file in batches of bounded size; raise ArrowInvalid beyond it.

    A value that is stored as a difference may be as long as all that its column chunk holds.
    """
    footer = file.metadata
    copied = [field.name for field in file.schema_arrow if field.name in columns and _is_copied(field.type)]
    rows, held, bound = rows_a_batch(footer, groups), 0, _BATCH_BYTES
    if copied:
        chunks = [footer.row_group(group).column(at) for group in groups for at in range(footer.num_columns)]
        texts = [each for each in chunks if {each.path_in_schema, each.path_in_schema.partition(".")[0]} & {*copied}]
        longest = max((max(each.total_uncompressed_size, each.total_compressed_size) for each in texts), default=0)
        rows = max(1, min(rows, _BATCH_BYTES // max(1, longest)))
        bound = max(bound, _MOST_BYTES_A_BYTE * sum(each.total_compressed_size for each in chunks))
    for batch in file.iter_batches(rows, row_groups=groups, columns=list(columns), **how):
        held += sum(batch.column(name).nbytes for name in copied)
        if held > bound:
            raise pa.ArrowInvalid(f"text of {', '.join(copied)} becomes more than {bound:,} bytes")
        yield batch


def _is_copied(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds text each time that it is repeated."""
    if pa.types.is_nested(kind):
        return any(_is_copied(kind.field(number).type) for number in range(kind.num_fields))
    is_text = kind_of(kind) in ("text", "bytes") and not pa.types.is_fixed_size_binary(kind)
    return is_text and not pa.types.is_dictionary(kind)


def iter_tables(
    file: pq.ParquetFile, columns: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[pa.Table]:
    """Yield the columns of some row groups of an open file, in plain types, with cells cut."""
    groups = range(file.num_row_groups) if groups is None else groups
    for batch in iter_batches(file, columns, groups):
        yield plain(cut(pa.Table.from_batches([batch]).select(list(columns))))


def rows_a_batch(footer: pq.FileMetaData, groups: Sequence[int]) -> int:
    """Return how many rows of some row groups to read at once, so that they have no more than a batch's bytes."""
    lengths = _lengths(footer)
    chosen = [footer.row_group(number) for number in groups]
    largest = max((_loaded_bytes(group, lengths) // max(1, group.num_rows) for group in chosen), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, largest)))


def cut(table: pa.Table, image: str | None = None) -> pa.Table:
    """Return the table with each value of text or bytes cut, except those of images."""
    for at, column in enumerate(table.columns):
        if table.field(at).name != image:
            chunks = [_cut(chunk) for chunk in column.chunks]
            table = table.set_column(at, table.field(at), pa.chunked_array(chunks, column.type))
    return table


def _cut(values: pa.Array) -> pa.Array:
    kind = values.type
    if kind_of(kind) not in ("text", "bytes"):
        return values
    held = values.dictionary if pa.types.is_dictionary(kind) else values.cast(plain_type(kind))
    if (pc.max(pc.binary_length(held)).as_py() or 0) <= LARGEST_CELL:
        return values
    short = pc.binary_slice(held.cast(pa.binary()), 0, LARGEST_CELL + 1).cast(held.type, safe=False)
    return pa.DictionaryArray.from_arrays(values.indices, short) if pa.types.is_dictionary(kind) else short


def plain(table: pa.Table) -> pa.Table:
    """Return the same values in plain types. Text is not checked and may be invalid UTF-8."""
    schema = pa.schema([field.with_type(plain_type(field.type)) for field in table.schema])
    if schema.equals(table.schema):
        return table
    columns = [column.cast(field.type, safe=False) for column, field in zip(table.columns, schema, strict=True)]
    return pa.table(columns, schema)


def cast(table: pa.Table, types: pa.Schema, where: str) -> pa.Table:
    """Return the table with some columns cast to `types`; refuse the file `where` if a value would change."""
    for field in types:
        at = table.schema.get_field_index(field.name)
        fault = f"column {field.name} is {table[at].type}, which this dataset keeps as {field.type}"
        with reading(where, "convert the column or leave it out, and choose a new output.uri", fault):
            table = table.set_column(at, field, table[at].cast(field.type))
    return table


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the plain type that holds the values of both; None if no type holds them unchanged."""
    one, other = plain_type(one), plain_type(other)
    kinds = [kind for kind in (one, other) if not pa.types.is_null(kind)]
    if len({kind_of(kind) for kind in kinds} & {"text", "bytes", "numbers"}) > 1:
        return None
    if len({pa.types.is_decimal(kind) for kind in kinds}) > 1:
        return None
    if len({kind.get_field_index("bytes") < 0 for kind in kinds if pa.types.is_struct(kind)}) > 1:
        return None  # of images, and of their paths alone
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def kind_of(column: pa.DataType) -> str:
    """Name what a column holds: text, numbers, bytes, or Arrow's name for any other type."""
    if pa.types.is_dictionary(column):
        return kind_of(column.value_type)
    if pa.types.is_string(column) or pa.types.is_large_string(column) or pa.types.is_string_view(column):
        return "text"
    if pa.types.is_integer(column) or pa.types.is_floating(column) or pa.types.is_decimal(column):
        return "numbers"
    if any(is_bytes(column) for is_bytes in _BYTES):
        return "bytes"
    return str(column)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that stands for all representations of the same values."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    return _PLAIN.get(kind, kind)


def readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a plain column with valid UTF-8: invalid bytes become U+FFFD, as in captions."""
    if pa.types.is_string(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            cells = column.cast(pa.binary()).to_pylist()
            return pa.chunked_array([[cell and cell.decode("utf-8", "replace") for cell in cells]], pa.string())
    return column
