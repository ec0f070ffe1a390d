"""Latents of several shapes."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp.model.checkpoints import EpochStart
from sdp.storage import open_storage
from sdp.train.data.batch import Batch
from sdp.train.data.granules import GranulePlan, count_buckets, views
from sdp.train.data.latents import GroupReader, LatentsDataset, WeightedDataset, open_latents
from sdp.train.data.order import RowRange, Shuffle
from sdp.train.data.reader import Reader
from sdp.train.data.rows import PAD
from sdp.train.data.stored import StoredRows
from sdp.train.data.weights import RowWeights
from sdp.train.validation import load_validation_batch
from sdp.train.world import World
from tests.latents import bucket_of, latent_in_bucket, make_latents

ROWS, GRANULE = 203, 4


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> LatentsDataset:
    dataset = make_latents(tmp_path_factory.mktemp("buckets"), ROWS, unit_rows=40, group_rows=8, buckets=True)
    return open_latents(dataset, 64)


def reader(latents: LatentsDataset, run: Path, rank: int = 0, world: int = 1) -> Reader:
    counts = count_buckets(latents, open_storage(str(run)), write=True)
    datasets = tuple(WeightedDataset(view) for view in views(latents, counts))
    groups = tuple(source.dataset.row_groups for source in datasets)
    plan = GranulePlan(groups, 5, Shuffle(lanes=2, units=2, row_groups=2), GRANULE)
    return Reader(plan, StoredRows(datasets), rank, world)


def micro_batches(batch: Batch) -> list[Batch]:
    return list(batch.split(GRANULE))


def test_every_row_comes_once_an_epoch_in_batches_of_one_shape_with_its_own_latents(
    latents: LatentsDataset, tmp_path: Path
) -> None:
    seen = Counter[int]()
    for batch in reader(latents, tmp_path).batches(0, 0, 3 * GRANULE):
        for part in micro_batches(batch):
            rows = [row for row in part.rows.tolist() if row != PAD]
            assert len({bucket_of(row) for row in rows}) <= 1
            assert part.weights.tolist() == [1.0] * len(rows) + [0.0] * (GRANULE - len(rows))
            for row, latent in zip(rows, part.latents, strict=False):
                assert np.array_equal(latent.numpy(), latent_in_bucket(row, 8))
            seen.update(rows)
    assert seen == Counter(range(ROWS))


@pytest.mark.parametrize("worlds", [(1, 2), (4, 3), (2, 5)])
def test_another_number_of_workers_goes_on_with_exactly_the_rows_that_are_left(
    latents: LatentsDataset, tmp_path: Path, worlds: tuple[int, int]
) -> None:
    start, size = EpochStart(lanes=max(2, worlds[0])), 6 * GRANULE
    alone = [set(batch.counted.tolist()) for batch in reader(latents, tmp_path).batches(1, 0, size, start)]
    steps = []
    for world, positions in zip(worlds, (0, 3 * size), strict=True):
        shares = [list(reader(latents, tmp_path, r, world).batches(1, positions, size, start)) for r in range(world)]
        assert {len(micro_batches(b)) for share in shares for b in share} == {-(-6 // world)}
        together = [[row for b in step for row in b.counted.tolist()] for step in zip(*shares, strict=True)]
        steps += together[:3] if not positions else together
    assert [sorted(step) for step in steps] == [sorted(step) for step in alone]
    assert Counter(row for step in steps for row in step) == Counter(range(ROWS))


def test_positions_are_the_rows_with_what_fills_up_the_last_batches_of_each_shape(
    latents: LatentsDataset, tmp_path: Path
) -> None:
    complete = reader(latents, tmp_path)
    for lanes in (1, 2, 4):
        batches = list(complete.batches(0, 0, GRANULE, EpochStart(lanes=lanes)))
        positions = complete.plan.positions(EpochStart(lanes=lanes))
        assert len(batches) * GRANULE == positions
        assert ROWS <= positions < ROWS + lanes * GRANULE * 5  # four shapes a lane, and rounding over lanes


def test_workers_that_share_the_lanes_evenly_read_no_row_twice(
    latents: LatentsDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, read = 0, GroupReader.read

    def counting(reader: GroupReader, ranges: Sequence[RowRange], *into: Any) -> None:
        nonlocal count
        count += sum(map(len, ranges))
        read(reader, ranges, *into)

    monkeypatch.setattr(GroupReader, "read", counting)
    for rank in range(4):
        for _ in reader(latents, tmp_path, rank, 4).batches(0, 0, 4 * GRANULE, EpochStart(lanes=4)):
            pass
    assert count == ROWS


def test_the_loss_can_be_measured_on_rows_of_several_shapes(latents: LatentsDataset) -> None:
    batch = load_validation_batch(latents, RowWeights(), 30, World(), GRANULE)
    rows = []
    for part in micro_batches(batch):
        for row, latent in zip(part.counted.tolist(), part.latents, strict=False):
            assert np.array_equal(latent.numpy(), latent_in_bucket(row, 8))
            rows.append(row)
    assert len(set(rows)) == len(rows) == 30
