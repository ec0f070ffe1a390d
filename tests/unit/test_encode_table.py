"""Stored tables: fixed-size columns that describe themselves, and units assembled without losing a row."""

import json

import numpy as np
import pyarrow as pa

from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.parts import serialise
from sdp.datasets.units import Unit, Work
from sdp.encode.chunk import Chunk, Encoded, ShapeGroup
from sdp.encode.table import LAYOUT, RowShape, assemble, rows_of, schema
from sdp.encode.transform import bucket_shapes
from sdp.families import TextSpace

SHAPE = RowShape((64, 128))


def encoded_of(rows: list[int], shape: RowShape = SHAPE) -> Encoded:
    """Return latents that contain their row's number."""
    count = len(rows)
    latents = {}
    for side in shape.resolutions:
        channels = 4 * (1 if shape.content == "sample" else 2)
        values = np.zeros((count, channels, side // 8, side // 8), np.float16) + np.array(rows)[:, None, None, None]
        latents[side] = [ShapeGroup(np.arange(count), values.astype(np.float16))]
    tokens = np.array(rows, np.uint16)[:, None] + np.arange(77, dtype=np.uint16)
    chunk = Chunk(np.array(rows, np.int64), [f"k{r}" for r in rows], tokens, {}, np.zeros(count, np.int16))
    width = shape.text.width
    embedded = None if width is None else np.zeros((count, 77, width), np.float16) + np.array(rows)[:, None, None]
    return Encoded(chunk, latents, None if embedded is None else embedded.astype(np.float16), np.ones(count, bool), [])


def test_the_columns_say_their_shape_dtype_and_scaling() -> None:
    columns = schema(SHAPE)
    assert columns.names == ["row", "key", "latents_64", "latents_128", "token_ids"]
    field = columns.field("latents_128")
    assert field.type == pa.binary(4 * 16 * 16 * 2)
    metadata = {key.decode(): value.decode() for key, value in field.metadata.items()}
    assert json.loads(metadata["shape"]) == [4, 16, 16]
    assert (metadata["dtype"], metadata["scaling_factor"], metadata["content"]) == ("float16", "0.18215", "sample")
    assert columns.field("token_ids").type == pa.binary(154)
    assert json.loads(columns.field("token_ids").metadata[b"shape"]) == [77]


def test_moments_have_a_column_of_their_own_name() -> None:
    shape = RowShape((64,), content="moments")
    table = rows_of(encoded_of([1], shape), shape)
    assert "moments_64" in table.column_names
    assert len(table["moments_64"][0].as_py()) == 2 * 8 * 8 * 8


def test_embeddings_take_the_place_of_token_ids() -> None:
    shape = RowShape((64,), text=TextSpace(width=16))
    table = rows_of(encoded_of([1, 3], shape), shape)
    assert "token_ids" not in table.column_names
    assert np.all(np.frombuffer(table["text_embedding"][1].as_py(), np.float16) == 3)
    assert table.schema.field("text_embedding").metadata[b"empty"] == b"_text/empty.npy"


def test_bucketed_latents_find_their_shape_by_the_bucket() -> None:
    shape = RowShape((64,), buckets=True)
    shapes = bucket_shapes(64)
    rows, buckets = [3, 4, 5], [0, 4, 0]
    groups = []
    for bucket in (0, 4):
        where = np.array([n for n, b in enumerate(buckets) if b == bucket])
        wide, tall = shapes[bucket]
        groups.append(ShapeGroup(where, np.full((len(where), 4, tall // 8, wide // 8), bucket + 1, np.float16)))
    plain = encoded_of(rows, shape)
    chunk = Chunk(plain.chunk.rows, plain.chunk.keys, plain.chunk.tokens, {}, np.array(buckets, np.int16))
    table = rows_of(Encoded(chunk, {64: groups}, None, np.array([True, True, False]), []), shape)
    by_bucket = json.loads(table.schema.field("latents_64").metadata[b"shapes"])
    for bucket, cell in zip(table["bucket"].to_pylist(), table["latents_64"].to_pylist(), strict=True):
        values = np.frombuffer(cell, np.float16).reshape(by_bucket[bucket])
        assert np.all(values == bucket + 1)


def test_nothing_is_a_table_of_no_rows() -> None:
    empty = rows_of(encoded_of([], SHAPE), SHAPE)
    assert empty.num_rows == 0
    assert empty.schema == schema(SHAPE)
    chunk = encoded_of([]).chunk
    without_groups = Encoded(chunk, {64: [], 128: []}, None, np.zeros(0, bool), [])
    assert rows_of(without_groups, SHAPE).num_rows == 0


def test_a_unit_is_put_together_by_address_with_every_outcome() -> None:
    late, early = rows_of(encoded_of([14, 15]), SHAPE), rows_of(encoded_of([10, 12]), SHAPE)
    failed = Outcome(11, FAILED, "undecodable", "cut short")
    crashed = Outcome(13, FAILED, "crashed", attempts=2)
    rows, account = assemble([(late, [crashed]), (early, [failed])], schema(SHAPE))
    assert rows["row"].to_pylist() == [10, 12, 14, 15]
    assert rows["key"].to_pylist() == ["k10", "k12", "k14", "k15"]
    assert [set(np.frombuffer(c, np.float16)) for c in rows["latents_64"].to_pylist()] == [{10}, {12}, {14}, {15}]
    assert np.frombuffer(rows["token_ids"][1].as_py(), np.uint16).tolist() == list(range(12, 89))
    assert account["row"].to_pylist() == list(range(10, 16))
    assert account["outcome"].to_pylist() == ["written", "failed", "written", "failed", "written", "written"]


def test_the_order_of_the_pieces_does_not_show_in_the_part() -> None:
    pieces = [(rows_of(encoded_of([n, n + 1]), SHAPE), [Outcome(n + 2, FAILED, "undecodable")]) for n in (0, 3, 6)]
    work = Work(Unit(0, 0, 9))
    parts = {
        serialise("latents", work, *assemble(order, schema(SHAPE)), layout=LAYOUT).to_pybytes()
        for order in (pieces, pieces[::-1], [pieces[1], pieces[2], pieces[0]])
    }
    assert len(parts) == 1
