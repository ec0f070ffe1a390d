"""The reader of latents."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from sdp.datasets.manifest import Dataset
from sdp.errors import DatasetError
from sdp.train.data.latents import WeightedDataset, open_latents
from sdp.train.data.reader import Reader
from sdp.train.data.rows import PAD
from sdp.train.data.weights import RowWeights
from tests.latents import latent_of, latents_reader, make_latents, tokens_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_latents(tmp_path_factory.mktemp("latents"), 203, failed=10)


def reader(dataset: Dataset, rank: int = 0, world: int = 1, load_weights: Any = RowWeights) -> Reader:
    return latents_reader(WeightedDataset(open_latents(dataset, 64), load_weights=load_weights), rank=rank, world=world)


def test_each_written_row_comes_once_with_its_own_latent_and_text(dataset: Dataset) -> None:
    seen = []
    for batch in reader(dataset).batches(0, 0, 16):
        assert (batch.latents.dtype, batch.latents.shape) == (torch.float16, (16, 4, 8, 8))
        for row, weight, latent, tokens in zip(batch.rows, batch.weights, batch.latents, batch.token_ids, strict=True):
            if row == PAD:
                assert weight == 0
                assert not latent.any()
                continue
            assert weight == 1
            assert np.array_equal(latent.numpy(), latent_of(int(row), 8))
            assert np.array_equal(tokens.numpy(), tokens_of(int(row), 1000))
            seen.append(int(row))
    assert sorted(seen) == [row for row in range(203) if row % 10]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_workers_take_equal_steps_whose_rows_are_the_single_workers(dataset: Dataset, world: int) -> None:
    alone = [set(batch.counted.tolist()) for batch in reader(dataset).batches(1, 0, 20)]
    shares = [list(reader(dataset, rank, world).batches(1, 0, 20)) for rank in range(world)]
    assert {len(share) for share in shares} == {len(alone)}
    assert {len(batch) for share in shares for batch in share} == {-(-20 // world)}
    for step, rows in enumerate(alone):
        together = [row for share in shares for row in share[step].counted.tolist()]
        assert sorted(together) == sorted(rows)


def test_rows_that_are_to_be_left_out_weigh_nothing_and_shift_no_others(dataset: Dataset) -> None:
    complete = list(reader(dataset).batches(0, 0, 16))
    weighted = list(reader(dataset, load_weights=lambda: lambda rows: (rows % 2).astype(np.float32)).batches(0, 0, 16))
    for left, right in zip(complete, weighted, strict=True):
        assert left.rows.tolist() == right.rows.tolist()
        assert right.counted.tolist() == [row for row in left.counted.tolist() if row % 2]


def test_leaving_in_mid_epoch_leaves_no_thread_behind(dataset: Dataset) -> None:
    before = threading.active_count()
    batches = reader(dataset).batches(0, 0, 4)
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_a_corrupt_row_group_is_named(tmp_path: Path) -> None:
    dataset = make_latents(tmp_path, 80)
    part = tmp_path / "latents" / "parts" / "000000001.parquet"
    content = bytearray(part.read_bytes())
    content[2000:2100] = bytes(100)
    part.write_bytes(content)
    with pytest.raises(DatasetError, match=r"000000001\.parquet: corrupt row group"):
        list(reader(dataset).batches(0, 0, 8))


def test_a_dataset_of_several_rows_an_address_is_refused(dataset: Dataset) -> None:
    """Its rows would be trained on several times with the same noise, and counted once."""
    written = pc.subtract(dataset.parts["written"], 1)
    parts = dataset.parts.set_column(dataset.parts.column_names.index("written"), "written", written)
    with pytest.raises(DatasetError, match="several rows share an address"):
        open_latents(replace(dataset, parts=parts), 64)
