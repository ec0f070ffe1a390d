"""The order of an epoch."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp.train.data.order import EpochOrder, RowGroups, Shuffle

PARTS = [[8, 8, 8, 3], [8, 8], [5], [8, 8, 8, 8, 1], [], [8, 7]]
GOLDEN = [35, 59, 25, 86, 80, 24, 37, 60, 26, 82, 58, 14]
SHUFFLE = Shuffle(lanes=3, units=2, row_groups=2)


def address(row_groups: RowGroups, row_group: int, row: int) -> int:
    """Return the address of a row of the dataset, numbered in the order of its parts."""
    return int(row_groups.rows[:row_group].sum()) + row


def row_at(order: EpochOrder, position: int) -> int:
    """Return a row by the definition: its lane, its window, its position."""
    lane = order.lane(position % order.lanes)
    window = lane.window_at(position // order.lanes)
    laid = [address(order.row_groups, p.row_group, r) for p in window.ranges for r in range(p.start, p.stop)]
    (n,) = np.flatnonzero(window.places() == position // order.lanes - window.start)
    return laid[n]


def rows_of(order: EpochOrder, start: int, stop: int, rank: int, world: int) -> list[int]:
    return [
        row_at(order, row * order.lanes + take.lane.number)
        for take in order.share(start, stop, rank, world)
        for row in range(take.start, take.stop)
    ]


def test_the_order_is_the_one_it_always_was() -> None:
    # A resumed run counts on it: a change of these numbers is a change of every epoch under way.
    order = EpochOrder(7, 1, RowGroups.of(PARTS), SHUFFLE)
    assert [row_at(order, p) for p in range(12)] == GOLDEN


def test_neighbours_in_the_dataset_are_torn_apart() -> None:
    order = EpochOrder(0, 0, RowGroups.of([[16] * 8] * 8), Shuffle(lanes=4, units=4, row_groups=4))
    rows = np.array([row_at(order, p) for p in range(order.rows)])
    assert np.mean(np.abs(np.diff(rows)) == 1) < 0.02
    # A batch of 64 comes from many units, not from the first ones.
    assert len(np.unique(rows[:64] // 128)) >= 4


@settings(max_examples=60)
@given(
    parts=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=7).filter(lambda p: any(p)),
    lanes=st.integers(1, 5),
    units=st.integers(1, 3),
    row_groups=st.integers(1, 3),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_any_numbers_of_workers_one_after_the_other_take_every_row_once(
    parts: list[list[int]], lanes: int, units: int, row_groups: int, worlds: list[tuple[int, int, int]]
) -> None:
    order = EpochOrder(3, 2, RowGroups.of(parts), Shuffle(lanes=lanes, units=units, row_groups=row_groups))
    at, taken = 0, list[int]()
    while at < order.rows:
        for world, batch, steps in worlds:
            for _ in range(steps):
                for rank in range(world):
                    share = rows_of(order, at, at + batch, rank, world)
                    assert len(share) <= -(-batch // world)
                    taken += share
                at += batch
    assert sorted(taken) == list(range(sum(map(sum, parts))))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 40), st.integers(0, 60))
def test_workers_that_share_the_lanes_evenly_keep_to_their_own_whatever_the_batch(
    world: int, per_worker: int, batch: int, start: int
) -> None:
    order = EpochOrder(1, 0, RowGroups.of([[8] * 8] * 8), Shuffle(lanes=world * per_worker, units=2, row_groups=2))
    takes = [
        [t for at in range(start, 512, batch) for t in order.share(at, at + batch, r, world)] for r in range(world)
    ]
    lanes = [{take.lane.number for take in of_worker} for of_worker in takes]
    assert sum(map(len, lanes)) == len(set().union(*lanes))
    assert sum(take.stop - take.start for of_worker in takes for take in of_worker) == 512 - start


def test_lanes_do_not_end_their_windows_together() -> None:
    order = EpochOrder(1, 0, RowGroups.of([[8] * 16] * 4), Shuffle(lanes=4, units=2, row_groups=4))
    assert len({order.lane(n).window_at(0).stop for n in range(4)}) == 4
