"""The columns of a latents dataset, and encoded chunks as its rows.

Latents are fixed-size binary (fp16 bytes): training reads them several times faster than lists or tensors. Shape, dtype
and scaling are in each column's own metadata.
"""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout
from sdp.encode.chunk import Encoded, ShapeGroup
from sdp.encode.transform import bucket_shapes
from sdp.families import LatentSpace, TextSpace

LAYOUT = Layout(row_group_rows=1024, compression="none", shared="text_embedding")
EMPTY_TEXT = "_text/empty.npy"
"""The embedding of the empty caption, for caption dropout."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The choices that decide the columns."""

    resolutions: tuple[int, ...]
    space: LatentSpace = field(default_factory=LatentSpace)
    content: Literal["sample", "moments"] = "sample"
    text: TextSpace = field(default_factory=TextSpace)
    buckets: bool = False


def schema(shape: RowShape) -> pa.Schema:
    """Return the columns. Their metadata describes their bytes; the schema's repeats that for other readers."""
    fields = [pa.field("row", pa.int64(), nullable=False), pa.field("key", pa.string())]
    if shape.buckets:
        fields.append(pa.field("bucket", pa.int16(), nullable=False))
    fields += [_latents_field(shape, side) for side in shape.resolutions]
    fields.append(_text_field(shape))
    if shape.text.pad is not None:
        fields.append(pa.field("tokens", pa.uint16(), nullable=False))
    meanings = {
        field.name: json.dumps({name.decode(): value.decode() for name, value in field.metadata.items()})
        for field in fields
        if field.metadata
    }
    return pa.schema(fields, meanings)


def column(shape: RowShape, side: int) -> str:
    """Return the name of the column of a resolution's latents."""
    return f"latents_{side}" if shape.content == "sample" else f"moments_{side}"


def text_column(shape: RowShape) -> str:
    """Return the name of the captions' column."""
    return "token_ids" if shape.text.width is None else "text_embedding"


def bytes_per_row(shape: RowShape) -> int:
    """Estimate the size of a row, all columns together."""
    latents = sum(2 * math.prod(_values(shape, side)) for side in shape.resolutions)
    return latents + shape.text.bytes + 40


def rows_of(encoded: Encoded, shape: RowShape) -> pa.Table:
    """Return the rows of a chunk that are kept, in the dataset's columns."""
    chunk, good = encoded.chunk, encoded.good
    columns: dict[str, Any] = {"row": chunk.rows[good]}
    columns["key"] = [key for key, keep in zip(chunk.keys, good.tolist(), strict=True) if keep]
    columns["bucket"] = chunk.buckets[good]
    for side in shape.resolutions:
        columns[column(shape, side)] = _latents(encoded.latents[side], good, shape, side)
    text = chunk.tokens if shape.text.width is None else encoded.text
    assert text is not None
    columns[text_column(shape)] = _fixed_size_binary(text[good].astype(shape.text.stored, copy=False), shape.text.bytes)
    if shape.text.pad is not None:
        own = text[good].any(2) if text.ndim > 2 else text[good] != shape.text.pad
        columns["tokens"] = np.where(own, np.arange(1, shape.text.tokens + 1), 0).max(1, initial=0)
    fields = schema(shape)
    return pa.table({name: columns[name] for name in fields.names}, schema=fields)


def assemble(pieces: Sequence[tuple[pa.Table, Sequence[Outcome]]], columns: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Join a unit's pieces; return its rows by address, and the account of all its addresses."""
    rows = pa.concat_tables([columns.empty_table(), *(table for table, _ in pieces)])
    addresses = rows["row"].to_numpy()
    if np.any(np.diff(addresses) < 0):  # the source's retried rows come after its first attempts
        rows = rows.take(pa.array(np.argsort(addresses, kind="stable")))
    outcomes = [outcome for _, piece_outcomes in pieces for outcome in piece_outcomes]
    written = [Outcome(row, WRITTEN) for row in addresses.tolist()]
    return rows, account_table([*outcomes, *written])


def npy_bytes(values: NDArray[np.float16]) -> bytes:
    """Return an array in numpy's file format."""
    sink = io.BytesIO()
    np.save(sink, values, allow_pickle=False)
    return sink.getvalue()


def _latents_field(shape: RowShape, side: int) -> pa.Field:
    values = _values(shape, side)
    metadata = {
        "dtype": "float16",
        "content": shape.content,
        "scaling_factor": repr(shape.space.scale),
        "resolution": str(side),
    }
    if shape.space.shift:
        metadata["shift_factor"] = repr(shape.space.shift)
    kind = pa.binary(2 * math.prod(values))
    if shape.buckets:
        # A row's shape is the one that its column `bucket` numbers.
        shapes = [_values(shape, wide, tall) for wide, tall in bucket_shapes(side)]
        metadata["shapes"], kind = json.dumps(shapes), pa.binary()
    else:
        metadata["shape"] = json.dumps(values)
    return pa.field(column(shape, side), kind, nullable=False, metadata=metadata)


def _text_field(shape: RowShape) -> pa.Field:
    text = shape.text
    metadata = {"dtype": text.stored.name, "shape": json.dumps(text.shape)}
    if text.width is not None:
        metadata["empty"] = EMPTY_TEXT
    return pa.field(text_column(shape), pa.binary(text.bytes), nullable=False, metadata=metadata)


def _latents(groups: Sequence[ShapeGroup], good: NDArray[np.bool_], shape: RowShape, side: int) -> pa.Array:
    if not shape.buckets:
        values = groups[0].values[good[groups[0].positions]] if groups else np.zeros(0)
        return _fixed_size_binary(values, 2 * math.prod(_values(shape, side)))
    cells: list[bytes] = [b""] * len(good)
    for group in groups:
        for number, item in zip(group.positions.tolist(), group.values, strict=True):
            cells[number] = item.tobytes()
    return pa.array([cell for cell, keep in zip(cells, good.tolist(), strict=True) if keep], pa.binary())


def _fixed_size_binary(values: NDArray[Any], width: int) -> pa.Array:
    """Return items as fixed-size binary, without a copy."""
    items = np.ascontiguousarray(values)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(items), [None, pa.py_buffer(items)])


def _values(shape: RowShape, width: int, height: int | None = None) -> tuple[int, int, int]:
    return shape.space.shape(width, height, moments=shape.content == "moments")
