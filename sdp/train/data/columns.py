"""The columns of a latents dataset: which ones a file has, in which form, and their bytes as arrays."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sdp.config.train import ColumnsConfig
from sdp.errors import DatasetError, one_line
from sdp.families import LatentSpace, TextSpace

TOKEN_IDS, TEXT = "token_ids", "text_embedding"
LATENTS, MOMENTS = "latents_", "moments_"
"""Prefixes of columns: a latent drawn once, or the mean and log-variance from which each epoch draws a new one."""
BUCKET = "bucket"
"""The column with the number of a row's shape, if crops have several."""

Items = NDArray[np.void]
"""The bytes of each row's array."""


@dataclass(frozen=True, slots=True)
class Column:
    """An array of fixed shape that is read for each row."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: str = ""
    """Its name in a file, where it is bytes of this shape and dtype unless `factor` or `shapes` is set."""
    factor: float | None = None
    """The scale of stored lists of numbers."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes among which a row's bucket chooses, if rows differ in length."""

    @property
    def numbers(self) -> int:
        return int(np.prod(self.shape))

    @property
    def width(self) -> int:
        return self.numbers * self.dtype.itemsize

    def items(self, data: pa.ChunkedArray) -> list[Items]:
        """Return the arrays of stored rows chunk by chunk; bytes are not copied."""
        kind = np.dtype((np.void, self.width))
        if self.factor is not None:
            return [_converted(chunk, self, self.factor).view(kind).reshape(-1) for chunk in data.chunks]
        if self.shapes:
            return [_equal_items(chunk, self).view(kind) for chunk in data.chunks]
        values = [(chunk, np.frombuffer(chunk.buffers()[1], dtype=kind)) for chunk in data.chunks]
        return [items[chunk.offset : chunk.offset + len(chunk)] for chunk, items in values]


_NUMBERS, _IDS = ("float16", "float32"), ("uint16", "uint32", "int32", "int64")
"""The dtypes of latents and embeddings, and of token ids."""
RowColumns = tuple[Column, Column]
"""The columns of latents and of text."""


def find_columns(file: pq.ParquetFile, uri: str, resolution: int, columns: ColumnsConfig) -> RowColumns:
    """Return the columns of latents and text, by one of the files: all have the same."""
    text = _text_name(file.schema_arrow, uri, columns)
    return _find_latents(file, uri, resolution, columns), _find_text(file, text, uri)


def _find_latents(file: pq.ParquetFile, uri: str, resolution: int, columns: ColumnsConfig) -> Column:
    schema = file.schema_arrow
    if columns.latents is None:
        kinds = {f"{LATENTS}{resolution}", f"{MOMENTS}{resolution}"} & set(schema.names)
        if not kinds:
            sides = [n.partition("_")[2] for n in schema.names if n.startswith((LATENTS, MOMENTS))]
            raise DatasetError(
                f"data.resolution: expected one that {uri} has ({', '.join(sides) or 'none'}), got {resolution}; "
                "process the images at that resolution"
            )
        (name,) = kinds
    else:
        name = columns.latents.replace("{resolution}", str(resolution))
    field = _field(schema, name, uri, "source.columns.latents")
    if pa.types.is_fixed_size_binary(field.type) or (pa.types.is_binary(field.type) and BUCKET in schema.names):
        return _describe_field(field, uri, _NUMBERS)
    shape = LatentSpace().shape(resolution)
    column = Column(f"{LATENTS}{resolution}", shape, np.dtype(np.float16), name, columns.factor or 1.0)
    count, of_kind = _numbers_a_row(file, field, uri)
    if count != column.numbers or of_kind != "f":
        what = "numbers" if of_kind == "f" else "whole numbers"
        raise DatasetError(
            f"source.columns.latents: expected {column.numbers} numbers per row, {shape} at data.resolution "
            f"{resolution}, got {count} {what} in {name} of {uri}; name the column of that resolution"
        )
    if columns.factor is None:
        _refuse_unscaled(file, column, uri)
    return column


def _refuse_unscaled(file: pq.ParquetFile, column: Column, uri: str) -> None:
    """Refuse raw VAE output, whose standard deviation is about five times what the U-Net expects."""
    sample = np.concatenate(column.items(_first_rows(file, column.stored))).view(column.dtype)
    if sample.size and (deviation := float(np.std(sample.astype(np.float32)))) > 3:
        raise DatasetError(
            f"source.columns.factor: {column.stored} of {uri} looks unscaled (standard deviation {deviation:.1f}); set "
            "it to 0.18215, or to 1 to use the latents as they are"
        )


def _text_name(schema: pa.Schema, uri: str, columns: ColumnsConfig) -> str:
    if columns.text:
        return columns.text[0]
    name = TOKEN_IDS if TOKEN_IDS in schema.names else TEXT
    if name not in schema.names:
        raise DatasetError(f"{uri}: no column {TOKEN_IDS} or {TEXT}; process the images with captions")
    return name


def _find_text(file: pq.ParquetFile, name: str, uri: str) -> Column:
    """Return a column of token ids or embeddings; plain numbers of other tools are Stable Diffusion's."""
    tokens = TextSpace().tokens
    field = _field(file.schema_arrow, name, uri, "source.columns.text")
    if pa.types.is_fixed_size_binary(field.type):
        column = _describe_field(field, uri, _NUMBERS + _IDS)
        ids = column.dtype.kind in "ui"
        if len(column.shape) == (1 if ids else 2):
            return replace(column, name=TOKEN_IDS if ids else TEXT)
        count = column.numbers
    else:
        count, of_kind = _numbers_a_row(file, field, uri)
        if of_kind == "i" and count == tokens:
            return Column(TOKEN_IDS, (tokens,), TextSpace().stored, name, factor=1.0)
        if of_kind == "f" and count and count % tokens == 0:
            return Column(TEXT, (tokens, count // tokens), np.dtype(np.float16), name, factor=1.0)
    raise DatasetError(
        f"source.columns.text: expected {tokens} token ids or {tokens} × width numbers per row, got {count} in "
        f"{name} of {uri}; name another column"
    )


def _field(schema: pa.Schema, name: str, uri: str, key: str) -> pa.Field:
    if name not in schema.names:
        raise DatasetError(f"{key}: no column {name} in {uri}; it has {', '.join(schema.names)}")
    return schema.field(name)


def _describe_field(field: pa.Field, uri: str, dtypes: Sequence[str]) -> Column:
    """Return a column of bytes whose metadata has its dtype and its shape, or several shapes if it is of buckets."""
    metadata, of_buckets = field.metadata or {}, pa.types.is_binary(field.type)
    try:
        dtype = np.dtype(metadata[b"dtype"].decode())
        listed = json.loads(metadata[b"shapes"]) if of_buckets else [json.loads(metadata[b"shape"])]
        shapes = tuple(map(tuple, listed))
        if not all((shapes, *shapes)) or any(type(side) is not int or side < 1 for shape in shapes for side in shape):
            raise ValueError(f"shape {listed}")
        if dtype.name not in dtypes or not dtype.isnative:
            raise ValueError(f"dtype {dtype}, not {' or '.join(dtypes)}")
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        cause = one_line(error, 200)
        raise DatasetError(
            f"{uri}: column {field.name}: its metadata does not describe its rows ({cause}); write dtype and shape"
        ) from error
    if of_buckets:
        return Column(field.name, max(shapes, key=np.prod), dtype, field.name, shapes=shapes)
    column = Column(field.name, shapes[0], dtype, field.name)
    if field.type.byte_width != column.width:
        raise DatasetError(f"{uri}: column {field.name} is {field.type}, expected {column.width} bytes per row")
    return column


def _numbers_a_row(file: pq.ParquetFile, field: pa.Field, uri: str) -> tuple[int, str]:
    """Return the count of numbers in the first row of a column, and their kind: floats (f) or integers (i)."""
    try:
        values = _flat(_first_rows(file, field.name).chunk(0).slice(0, 1))
    except (pa.ArrowException, TypeError) as error:
        raise DatasetError(
            f"{uri}: column {field.name} is {field.type}, expected bytes, lists or tensors of numbers ({error})"
        ) from error
    kind = "i" if len(values) and pa.types.is_integer(values.type) else "f"
    return len(values), kind


def _first_rows(file: pq.ParquetFile, name: str) -> pa.ChunkedArray:
    """Return the first values of a column, up to 256 of one row group."""
    groups = (file.read_row_group(number, columns=[name])[name] for number in range(file.num_row_groups))
    rows = next((rows for rows in groups if len(rows)), None)
    return pa.chunked_array([[]], file.schema_arrow.field(name).type) if rows is None else rows.slice(0, 256)


def _flat(array: pa.Array) -> pa.Array:
    """Return all numbers of an array of tensors or of lists of any depth."""
    lists = array.storage if isinstance(array, pa.ExtensionArray) else array
    values = pc.list_flatten(lists, recursive=True)
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
        raise TypeError(f"{values.type} inside")
    return values


def _converted(array: pa.Array, column: Column, factor: float) -> NDArray[np.generic]:
    """Convert lists of numbers to rows of the column's shape and dtype."""
    values = _flat(array)
    if values.null_count or len(values) != len(array) * column.numbers or not _equally_long(array, column):
        raise DatasetError(f"not {column.numbers} numbers in each row")
    numbers = values.to_numpy(zero_copy_only=False).reshape(len(array), column.numbers)
    if factor != 1:
        numbers = numbers.astype(np.float32) * np.float32(factor)
    return np.ascontiguousarray(numbers.astype(column.dtype, copy=False))


def _equal_items(array: pa.Array, column: Column) -> NDArray[np.uint8]:
    """Return the bytes of an array whose rows all have the column's width."""
    _, offsets, values = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    if np.any(np.diff(ends) != column.width):
        raise DatasetError(f"not {column.width} bytes in each row of {column.shape}")
    data = np.frombuffer(values, np.uint8) if values is not None else np.zeros(0, np.uint8)
    return data[ends[0] : ends[-1]] if len(ends) else data[:0]


def _equally_long(array: pa.Array, column: Column) -> bool:
    """Return whether each row has the column's count of numbers; nested lists are only checked in total."""
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if array.null_count:
        return False
    if pa.types.is_fixed_size_list(array.type) or pa.types.is_nested(array.type.value_type):
        return True
    return bool(pc.all(pc.equal(pc.list_value_length(array), column.numbers)).as_py())
