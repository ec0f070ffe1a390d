"""Latents written by other programs: other column names, lists and tensors of numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.errors import DatasetError
from sdp.model.sources import resolve
from sdp.train.data.latents import refuse_another_encoder
from sdp.train.data.rows import PAD
from sdp.train.data.sources import open_sources
from tests.latents import latent_of, latents_reader, tokens_of
from tests.training import config

ROWS = 40
COLUMNS = {"latents": "image_latents_{resolution}", "text": ["caption_ids"]}


def tensors(values: "np.ndarray[Any, Any]") -> pa.Array:
    """Return a column in Ray's tensor format."""
    flat = pa.array(values.reshape(-1))
    offsets = np.arange(len(values) + 1, dtype=np.int64) * values[0].size
    return pa.LargeListArray.from_arrays(pa.array(offsets), flat)


def nested(values: "np.ndarray[Any, Any]") -> pa.Array:
    return pa.array(values.tolist())


def fixed(values: "np.ndarray[Any, Any]") -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values[0].size)


def shaped(values: "np.ndarray[Any, Any]") -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values)


def write(root: Path, form: Any = tensors, scale: float = 1.0, rows: int = ROWS, name: str = "a") -> None:
    latents = np.stack([latent_of(row, 8) for row in range(rows)]).astype(np.float32) / scale
    tokens = np.stack([tokens_of(row, 1000) for row in range(rows)]).astype(np.int64)
    (root / "latents").mkdir(exist_ok=True)
    table = pa.table({"image_latents_64": form(latents), "caption_ids": form(tokens)})
    pq.write_table(table, root / "latents" / f"{name}.parquet", row_group_size=7)


def batches(root: Path, **columns: Any) -> Any:
    how = config(root, source__columns={**COLUMNS, **columns})
    sources = open_sources(how, write=lambda: None)
    return latents_reader(*sources.datasets).batches(0, 0, 8)


@pytest.mark.parametrize("form", [tensors, nested, fixed, shaped])
def test_numbers_in_any_form_become_latents_and_token_ids(tmp_path: Path, form: Any) -> None:
    write(tmp_path, form)
    seen = []
    for batch in batches(tmp_path):
        for row, latent, tokens in zip(batch.rows.tolist(), batch.latents, batch.token_ids, strict=True):
            if row != PAD:
                assert np.array_equal(latent.numpy(), latent_of(row, 8))
                assert np.array_equal(tokens.numpy(), tokens_of(row, 1000))
                seen.append(row)
    assert sorted(seen) == list(range(ROWS))


def test_unscaled_latents_are_refused_unless_a_factor_is_set(tmp_path: Path) -> None:
    write(tmp_path, scale=0.18215)
    with pytest.raises(DatasetError, match=r"source\.columns\.factor: .* looks unscaled \(standard deviation 5\.\d\)"):
        batches(tmp_path)
    batch = next(batches(tmp_path, factor=0.18215))
    assert np.allclose(batch.latents[0].numpy(), latent_of(int(batch.rows[0]), 8), atol=4e-3)
    raw = next(batches(tmp_path, factor=1))
    assert float(raw.latents.float().std()) > 5


def test_a_run_keeps_to_the_files_that_it_began_with(tmp_path: Path) -> None:
    write(tmp_path)
    first = [batch.rows.tolist() for batch in batches(tmp_path)]
    write(tmp_path, name="0-comes-first")
    assert [batch.rows.tolist() for batch in batches(tmp_path)] == first
    write(tmp_path, rows=39)
    with pytest.raises(DatasetError, match=r"a\.parquet: changed since the run began"):
        batches(tmp_path)


def test_a_damaged_list_of_files_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    batches(tmp_path)
    (listing,) = (tmp_path / "run/_source").iterdir()
    listing.write_bytes(b"damaged")
    with pytest.raises(DatasetError, match=r"_source/000\.parquet: malformed .*; begin another run"):
        batches(tmp_path)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"latents": "gone"}, r"source\.columns\.latents: no column gone in .*a\.parquet; it has image_latents_64"),
        ({"latents": "caption_ids"}, r"source\.columns\.latents: expected 256 numbers per row.* got 77 whole numbers"),
        ({"text": ["image_latents_64"]}, r"source\.columns\.text: expected 77 token ids .* got 256"),
        ({"text": ["gone"]}, r"source\.columns\.text: no column gone"),
    ],
)
def test_a_column_that_is_not_what_it_should_be_is_told(tmp_path: Path, columns: dict[str, Any], line: str) -> None:
    write(tmp_path)
    with pytest.raises(DatasetError, match=line):
        batches(tmp_path, **columns)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (">f2", "[4, 8, 8]"), ("O", "[4, 8, 8]"), ("int16", "[4, 8, 8]"), ("float64", "[1, 8, 8]"), ("float16", "4"),
        ("float16", "[-4, -8, 8]"), ("float16", "[4.0, 8, 8]"), ("float16", '["4", 8, 8]'), ("float16", "[[4, 8, 8]]"),
        ("float16", "[" * 100_000), ("float16", "[]"), ("float16", "{}"),
    ],
)  # fmt: skip
def test_metadata_that_describes_no_latents_is_refused_with_the_file(tmp_path: Path, dtype: str, shape: str) -> None:
    field = pa.field("latents_64", pa.binary(512), metadata={"dtype": dtype, "shape": shape})
    schema = pa.schema([field, pa.field("caption_ids", pa.list_(pa.int64()))])
    (tmp_path / "latents").mkdir()
    pq.write_table(pa.table([[bytes(512)], [[0] * 77]], schema=schema), tmp_path / "latents/a.parquet")
    with pytest.raises(DatasetError, match=r"a\.parquet: column latents_64: its metadata does not describe its rows"):
        batches(tmp_path, latents="latents_{resolution}")


def test_rows_of_another_length_are_told_with_their_file(tmp_path: Path) -> None:
    write(tmp_path)
    table = pq.read_table(tmp_path / "latents/a.parquet")
    lists = table["image_latents_64"].to_pylist()
    lists[20] = lists[20][:-1]
    spoilt = table.set_column(0, "image_latents_64", pa.array(lists, pa.large_list(pa.float32())))
    pq.write_table(spoilt, tmp_path / "latents/a.parquet", row_group_size=7)
    with pytest.raises(DatasetError, match=r"a\.parquet: row group 2: not 256 numbers in each row; repair the file"):
        list(batches(tmp_path))


def test_a_file_without_a_column_is_told_with_its_name(tmp_path: Path) -> None:
    write(tmp_path)
    table = pq.read_table(tmp_path / "latents/a.parquet")
    pq.write_table(table.drop_columns("caption_ids"), tmp_path / "latents/b.parquet")
    with pytest.raises(DatasetError, match=r"b\.parquet: no column caption_ids; repair the file"):
        list(batches(tmp_path))


def test_embeddings_of_another_width_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    table = pq.read_table(tmp_path / "latents/a.parquet").append_column("wide", nested(np.zeros((ROWS, 77, 96))))
    pq.write_table(table, tmp_path / "latents/a.parquet")
    how = config(tmp_path, source__columns={**COLUMNS, "text": ["wide"]})
    (source,) = open_sources(how, write=lambda: None).all
    with pytest.raises(DatasetError, match=r"model\.source: expected a text encoder of width 96, .* got 64 in"):
        refuse_another_encoder(how, None, source.dataset, resolve("builtin:tiny"))
