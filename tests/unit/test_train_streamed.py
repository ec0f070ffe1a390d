"""The streaming reader and its account, with a feed that deals rows out at random; nothing is lost and nothing twice,
wherever and however often it ends."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from sdp.datasets.ledger import Ledger
from sdp.datasets.manifest import Dataset
from sdp.train.data.batch import PAD, Batch
from sdp.train.data.latents import LatentsDataset, open_latents
from sdp.train.data.order import EpochOrder
from sdp.train.data.segments import EpochLeft, left_of, windows
from sdp.train.data.streamed import StreamedReader
from sdp.train.data.weights import RowWeights
from tests.dealer import SHAPE, Dealer
from tests.latents import latent_of, make_latents, tokens_of

ROWS = 203
WRITTEN = [row for row in range(ROWS) if row % 10]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_latents(tmp_path_factory.mktemp("latents"), ROWS, failed=10)


@pytest.fixture(scope="module")
def latents(dataset: Dataset) -> LatentsDataset:
    return open_latents(dataset, 64)


def readers(dealer: Dealer) -> list[StreamedReader]:
    columns = dealer.latents.columns
    return [
        StreamedReader(dealer.feed(rank), columns, rank, dealer.world, dealer.latents.rows)
        for rank in range(dealer.world)
    ]


def steps(dealer: Dealer, epoch: int, position: int, batch: int) -> Iterator[tuple[list[Batch], int]]:
    """Step by step what all workers have, and the positions of the epoch as they see it."""
    all_readers = readers(dealer)
    streams = [reader._batches(epoch, position, batch) for reader in all_readers]
    while True:
        got = [next(stream, None) for stream in streams]
        assert len({one is None for one in got}) == 1
        if got[0] is None:
            return
        assert len({reader.rows for reader in all_readers}) == 1
        yield [one for one in got if one is not None], all_readers[0].rows


@pytest.mark.parametrize(
    ("world", "batch", "segment"), [(1, 16, 1000), (2, 15, 60), (3, 20, 41), (5, 8, 16), (4, 50, 64)]
)
def test_each_row_comes_once_with_its_own_latent_and_text_in_equal_steps(
    latents: LatentsDataset, world: int, batch: int, segment: int
) -> None:
    dealer = Dealer(latents, segment, world, world)
    seen: list[int] = []
    for got, positions in steps(dealer, 0, 0, batch):
        assert {len(one) for one in got} == {-(-batch // world)}
        for one in got:
            for row, weight, latent, tokens in zip(one.rows, one.weights, one.latents, one.token_ids, strict=True):
                if row == PAD:
                    assert not weight
                    assert not latent.any()
                    continue
                assert weight == 1
                assert np.array_equal(latent.numpy(), latent_of(int(row), 8))
                assert np.array_equal(tokens.numpy(), tokens_of(int(row), 1000))
                seen.append(int(row))
        assert sum(len(one.counted) for one in got) <= batch
        assert positions - latents.rows in range(world * -(-latents.rows // segment))
    assert sorted(seen) == WRITTEN


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_trained_on_once_an_epoch_wherever_it_ends_and_whoever_goes_on(
    seed: int, latents: LatentsDataset
) -> None:
    chance = random.Random(seed)
    segment = chance.choice([12, 24, 41, 64, 500])
    weigh = RowWeights(holdout=chance.choice([0.0, 0.0, 0.2]), limit=chance.choice([None, 150]))
    wanted = {row for row in WRITTEN if weigh(np.array([row]))[0]}
    ledger, position, counts = Ledger(), 0, Counter[int]()
    for attempt in range(200):
        world, batch, life = chance.randint(1, 4), chance.randint(1, 30), chance.randint(0, 12)
        dealer = Dealer(latents, segment, world, chance.randrange(10**9), ledger.rows(0), weigh)
        saved = (Ledger({0: ledger.rows(0)}), position, Counter(counts))
        died = over = False
        for number, (got, positions) in enumerate(steps(dealer, 0, position, batch)):
            if number == life and attempt < 199:
                died = True
                break
            for one in got:
                ledger.add(0, one.counted.numpy())
                counts.update(one.counted.tolist())
            position += batch
            over = position >= positions
            if chance.random() < 0.3:  # a checkpoint
                saved = (Ledger({0: ledger.rows(0)}), position, Counter(counts))
        if over and not died:
            break
        ledger, position, counts = saved
    assert set(counts) == wanted
    assert set(counts.values()) == {1}
    assert set(ledger.rows(0)) == wanted


def test_an_epoch_with_nothing_left_ends_by_one_empty_step(latents: LatentsDataset) -> None:
    dealer = Dealer(latents, 64, 2, 0, BitMap64(WRITTEN))
    ((got, positions),) = list(steps(dealer, 0, 200, 10))
    assert positions == 201
    assert [one.counted.tolist() for one in got] == [[], []]


def test_the_order_of_a_stream_depends_on_seed_and_epoch_alone(latents: LatentsDataset) -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        order = EpochOrder(seed, epoch, latents.blocks, SHAPE)
        left = EpochLeft(order, 64)
        tasks = [t for nth in range(len(left.counts)) for t in windows(latents, left.segment(nth), order, SHAPE, 1)]
        return [row for task in tasks for row in task.load(RowWeights()).rows.tolist()]

    assert rows(1, 0) == rows(1, 0)
    assert sorted(rows(1, 0)) == WRITTEN
    assert len({tuple(rows(*which)) for which in ((1, 0), (1, 1), (2, 0))}) == 3


def test_only_row_groups_that_may_have_consumed_rows_are_read_to_see_what_is_left(
    latents: LatentsDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdp.train.data import segments

    order = EpochOrder(5, 0, latents.blocks, SHAPE)
    first = {row for task in windows(latents, EpochLeft(order, 24).segment(0), order, SHAPE, 1)
             for row in task.load(RowWeights()).rows.tolist()}  # fmt: skip
    read: list[Any] = []
    inner: Callable[..., Any] = segments.GroupReader.addresses
    monkeypatch.setattr(segments.GroupReader, "addresses", lambda self, piece: read.append(piece) or inner(self, piece))
    left = left_of(order, 24, latents, BitMap64(sorted(first)[:5]), RowWeights())
    assert left.first == 0
    assert left.counts[0] == 24 - 5
    assert 0 < len(read) < len(latents.blocks)


def test_a_batch_is_mixed_from_several_blocks(latents: LatentsDataset) -> None:
    dealer = Dealer(latents, 1000, 1, 0)
    got, _ = next(steps(dealer, 0, 0, 16))
    assert len({int(row) // 8 for row in got[0].rows}) >= 6
