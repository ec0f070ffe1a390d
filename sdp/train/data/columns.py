"""The columns of a latents dataset: which ones a file has, and their bytes as arrays."""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdp.errors import DatasetError
from sdp.model.family import TOKENS

TOKEN_IDS, TEXT = "token_ids", "text_embedding"
LATENTS, MOMENTS = "latents_", "moments_"
"""Prefixes of columns: a latent drawn once, or the mean and log-variance from which each epoch draws a new one."""
BUCKET = "bucket"
"""The column with the number of a row's shape, if crops have several."""

Items = NDArray[np.void]
"""The bytes of each row's array."""


@dataclass(frozen=True, slots=True)
class Column:
    """An array that is read for each row."""

    name: str
    shape: tuple[int, ...]
    """The shape of each row, or the largest one."""
    dtype: np.dtype
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes among which a row's bucket chooses, if rows differ in length."""

    @property
    def numbers(self) -> int:
        return int(np.prod(self.shape))

    @property
    def width(self) -> int:
        return self.numbers * self.dtype.itemsize

    def items(self, data: pa.ChunkedArray) -> list[Items]:
        """Return the column's arrays chunk by chunk, without copying their bytes."""
        kind = np.dtype((np.void, self.width))
        if self.shapes:
            return [_equal_items(chunk, self).view(kind) for chunk in data.chunks]
        values = [(chunk, np.frombuffer(chunk.buffers()[1], dtype=kind)) for chunk in data.chunks]
        return [items[chunk.offset : chunk.offset + len(chunk)] for chunk, items in values]


def find_columns(schema: pa.Schema, uri: str, resolution: int) -> tuple[Column, Column]:
    """Return the columns of latents and text, by the schema of one of the files: all have the same."""
    latents = {f"{LATENTS}{resolution}", f"{MOMENTS}{resolution}"} & set(schema.names)
    if not latents:
        sides = [n.partition("_")[2] for n in schema.names if n.startswith((LATENTS, MOMENTS))]
        raise DatasetError(
            f"data.resolution: expected one that {uri} has ({', '.join(sides) or 'none'}), got {resolution}; "
            "process the images at that resolution"
        )
    name = TOKEN_IDS if TOKEN_IDS in schema.names else TEXT
    if name not in schema.names:
        raise DatasetError(f"{uri}: no column {TOKEN_IDS} or {TEXT}; process the images with captions")
    text = _column(schema.field(name), uri)
    if text.shape[0] != TOKENS or len(text.shape) != (1 if name == TOKEN_IDS else 2):
        raise DatasetError(f"{uri}: {name}: expected one caption of {TOKENS} tokens per row; process the images again")
    return _column(schema.field(latents.pop()), uri), text


def _column(field: pa.Field, uri: str) -> Column:
    """Return a column of bytes whose metadata has its dtype and its shape, or several shapes if it is of buckets."""
    metadata = field.metadata or {}
    try:
        dtype = np.dtype(metadata[b"dtype"].decode())
        if pa.types.is_binary(field.type):
            shapes = tuple(tuple(map(int, shape)) for shape in json.loads(metadata[b"shapes"]))
            return Column(field.name, max(shapes, key=np.prod), dtype, shapes)
        column = Column(field.name, tuple(json.loads(metadata[b"shape"])), dtype)
    except (KeyError, ValueError, TypeError) as error:
        raise DatasetError(f"{uri}: column {field.name} has no shape and dtype in its metadata ({error})") from error
    if field.type != pa.binary(column.width):
        raise DatasetError(f"{uri}: column {field.name} is {field.type}, expected {column.width} bytes per row")
    return column


def _equal_items(array: pa.Array, column: Column) -> NDArray[np.uint8]:
    """Return the bytes of an array whose rows all have the column's width."""
    _, offsets, values = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    if np.any(np.diff(ends) != column.width):
        raise DatasetError(f"not {column.width} bytes in each row of {column.shape}")
    data = np.frombuffer(values, np.uint8) if values is not None else np.zeros(0, np.uint8)
    return data[ends[0] : ends[-1]] if len(ends) else data[:0]
