"""Several datasets as one."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp.datasets.manifest import Dataset
from sdp.errors import DatasetError
from sdp.model.checkpoints import FIRST, DatasetPosition, EpochStart
from sdp.train.data.latents import WeightedDataset, open_latents
from sdp.train.data.mixture import Mixture, MixtureSpan, shares_of
from sdp.train.data.reader import Reader
from sdp.train.data.sources import refuse_another_kind
from sdp.train.data.weights import RowWeights
from tests.latents import latent_of, latents_reader, make_latents, split_address


def positions(
    mixture: Mixture, epoch: int, start: int, stop: int, places: Sequence[DatasetPosition] = ()
) -> list[tuple[int, int, int]]:
    return [
        (span.dataset, span.epoch, position)
        for span in mixture.spans(epoch, start, stop, places)
        for position in range(span.start, span.stop)
    ]


def test_each_dataset_has_the_share_that_its_weight_says_at_every_point() -> None:
    mixture = Mixture((1_000_000, 7000, 50), (1.0, 0.5, 0.1))
    taken = Counter[int]()
    for start in range(0, 200_000, 1000):
        taken.update(dataset for dataset, _, _ in positions(mixture, 0, start, start + 1000))
        for dataset, weight in enumerate((1.0, 0.5, 0.1)):
            assert taken[dataset] / (start + 1000) == pytest.approx(weight / 1.6, abs=0.003)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 5), min_size=3, max_size=3),
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_each_pass_over_a_dataset_takes_each_of_its_rows_once_and_passes_follow_one_another(
    sizes: list[int], weights: list[float], steps: list[int]
) -> None:
    mixture = Mixture(tuple(sizes), (1.0, *weights[: len(sizes) - 1]))
    taken: dict[int, list[tuple[int, int]]] = {dataset: [] for dataset in range(len(sizes))}
    for epoch in range(2):
        at, step = 0, 0
        while at < mixture.rows:
            size = steps[step % len(steps)]
            drawn = positions(mixture, epoch, at, at + size)
            assert len(drawn) == min(size, mixture.rows - at)
            for dataset, own, position in drawn:
                taken[dataset].append((own, position))
            at, step = at + size, step + 1
    for dataset, size in enumerate(sizes):
        every = [divmod(n, size) for n in range(len(taken[dataset]))]
        assert taken[dataset] == every
    assert taken[0][-1] == (1, sizes[0] - 1)  # an epoch is a pass over the first


@settings(max_examples=60)
@given(firsts=st.lists(st.integers(1, 60), min_size=2, max_size=4), other=st.integers(1, 60), weight=st.floats(0.01, 5))
def test_passes_over_the_others_go_on_unbroken_when_the_first_dataset_has_changed_between_epochs(
    firsts: list[int], other: int, weight: float
) -> None:
    start, taken = FIRST, []
    for epoch, size in enumerate(firsts):
        mixture = Mixture((size, other), (1.0, weight))
        rows = positions(mixture, epoch, 0, mixture.rows, start.places)
        assert [row[1:] for row in rows if row[0] == 0] == [(epoch, position) for position in range(size)]
        taken += [row[1:] for row in rows if row[0] == 1]
        start = EpochStart(mixture.after(epoch, start.places))
    assert taken == [divmod(n, other) for n in range(len(taken))]


def test_a_dataset_that_has_changed_begins_another_pass_so_that_no_pass_takes_a_row_twice() -> None:
    mixture = Mixture((60, 20), (1.0, 0.5))
    (_, _, _), (number, had, rows) = places = mixture.after(0)
    assert (number, rows) == (1, 20)
    assert 8 <= had <= 12
    grown = Mixture((60, 25), (1.0, 0.5))
    of_other = [row[1:] for row in positions(grown, 1, 0, grown.rows, places) if row[0] == 1]
    assert of_other == [(2 + n // 25, n % 25) for n in range(len(of_other))]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 6))
def test_workers_share_spans_evenly(lengths: list[int], world: int) -> None:
    spans = [MixtureSpan(n, 0, 5, 5 + length) for n, length in enumerate(lengths)]
    shares = [shares_of(spans, rank, world) for rank in range(world)]
    rows = [(span.dataset, row) for share in shares for span, at, to in share for row in range(at, to)]
    assert rows == [(n, row) for n, length in enumerate(lengths) for row in range(length)]
    assert max(sum(to - at for _, at, to in share) for share in shares) <= -(-sum(lengths) // world)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    root = tmp_path_factory.mktemp("mixture")
    return [make_latents(root / "a", 103, failed=10), make_latents(root / "b", 30, unit_rows=15)]


def reader(datasets: list[Dataset], rank: int = 0, world: int = 1) -> Reader:
    first, second = (open_latents(dataset, 64) for dataset in datasets)
    return latents_reader(WeightedDataset(first), WeightedDataset(second, 0.75), rank=rank, world=world)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_come_with_their_own_latents_under_addresses_and_epochs_of_their_own(
    datasets: list[Dataset], world: int
) -> None:
    account: Counter[tuple[int, int]] = Counter()
    for epoch in range(2):
        shares = [list(reader(datasets, rank, world).batches(epoch, 0, 16)) for rank in range(world)]
        assert {len(batch) for share in shares for batch in share} == {-(-16 // world)}
        for batch in (batch for share in shares for batch in share):
            assert batch.epochs is not None or not len(batch.counted)
            for own, rows in batch.counted_by_epoch(epoch):
                account.update((own, row) for row in rows.tolist())
            for row, latent, weight in zip(batch.rows.tolist(), batch.latents, batch.weights, strict=True):
                if weight:
                    assert np.array_equal(latent.numpy(), latent_of(split_address(row)[1], 8))
    assert set(account.values()) == {1}  # of each dataset, each row once in each of its passes
    first = {key for key in account if split_address(key[1])[0] == 0}
    assert first == {(epoch, row) for epoch in range(2) for row in range(103) if row % 10}
    second = len(account) - len(first)
    assert second == pytest.approx(0.75 * len(first), abs=2)
    passes = Counter(own for own, row in account if split_address(row)[0] == 1)
    assert [passes[own] for own in range(max(passes))] == [30] * max(passes)


def test_weights_are_read_once_an_epoch_though_it_passes_over_a_small_dataset_again_and_again(
    datasets: list[Dataset],
) -> None:
    first, second = (open_latents(dataset, 64) for dataset in datasets)
    load = Mock(return_value=RowWeights())
    batches = latents_reader(WeightedDataset(first), WeightedDataset(second, 0.75, load)).batches(0, 0, 16)
    assert {own for batch in batches for own, _ in batch.counted_by_epoch(0)} == {0, 1, 2}
    load.assert_called_once()


def test_a_mixed_epoch_continues_where_it_was_left_with_other_workers(datasets: list[Dataset]) -> None:
    alone = [sorted(b.counted.tolist()) for b in reader(datasets).batches(1, 0, 12)]
    shares = [list(reader(datasets, rank, 2).batches(1, 60, 12)) for rank in range(2)]
    together = [sorted([*a.counted.tolist(), *b.counted.tolist()]) for a, b in zip(*shares, strict=True)]
    assert together == alone[5:]


def test_datasets_of_different_kinds_are_not_mixed(datasets: list[Dataset], tmp_path: Path) -> None:
    other = make_latents(tmp_path, 20, resolution=128)
    one, another = open_latents(datasets[0], 64), open_latents(other, 128)
    with pytest.raises(DatasetError, match=r"source\.also: expected latents_64 .* got latents_128"):
        refuse_another_kind(WeightedDataset(one), WeightedDataset(another))
