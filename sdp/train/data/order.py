"""The order of an epoch: a pure function of (seed, epoch) and the dataset, whatever the number of workers.

Units are shuffled by (seed, epoch). The row groups of a few units at a time are then shuffled together; the result is
the tape. The tape is cut into `lanes` of equal length, and the epoch takes one row from each lane in turn: position p
is row p // lanes of lane p % lanes. Inside a lane, the rows of a few row groups at a time (a window) are shuffled. So a
batch mixes rows from the whole dataset, while the reader of a lane reads each row group once. An epoch that begins with
more workers than lanes has a lane for each worker, and keeps these lanes if the number of workers changes.

The position alone tells which rows are consumed: rows at lower positions are consumed, the others are not, and any
number of workers can continue from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_TAPE, _WINDOW, GRANULES = 1, 2, 4  # never renumber, or orders change


@dataclass(frozen=True)
class RowGroups:
    """The row groups of a dataset, one entry each."""

    part: Ints
    """The number of its part."""
    group: Ints
    """Its number within the part."""
    rows: Ints
    """Its number of rows."""

    @staticmethod
    def of(parts: Sequence[Sequence[int]]) -> "RowGroups":
        """Return the row groups, given for each part the rows of its row groups."""
        return RowGroups.listed(pa.chunked_array([pa.array(parts, pa.list_(pa.int64()))]))

    @staticmethod
    def listed(row_groups: pa.ChunkedArray) -> "RowGroups":
        """Return the row groups that a column lists, by their rows or as a manifest does.

        It makes no Python object for each of millions.
        """
        lists = pa.concat_arrays(row_groups.chunks)
        counts = pc.list_value_length(lists).to_numpy().astype(np.int64)
        values = lists.flatten()
        values = pc.struct_field(values, "rows") if pa.types.is_struct(values.type) else values
        rows = values.to_numpy().astype(np.int64)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return RowGroups(np.repeat(np.arange(len(counts)), counts), np.arange(len(rows)) - first, rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class LaneRange:
    """Consecutive rows of a lane."""

    lane: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The width of an epoch's mixing. It decides the order, so that a run keeps it."""

    lanes: int = 16
    """Sequences that are read side by side. If the number of trainers divides it, no row group is read twice."""
    units: int = 4
    """Parts whose row groups are mixed together: 120,000 rows of 256 px."""
    row_groups: int = 4
    """Row groups of a lane whose rows are permuted together."""


@dataclass(frozen=True)
class EpochOrder:
    """All positions of one epoch."""

    seed: int
    epoch: int
    row_groups: RowGroups
    shape: Shuffle

    @cached_property
    def rows(self) -> int:
        """The number of positions."""
        return int(self.row_groups.rows.sum())

    @cached_property
    def lanes(self) -> int:
        """The number of lanes: as configured, or fewer if a small dataset cannot fill a window for each."""
        return max(1, min(self.shape.lanes, len(self.row_groups) // self.shape.row_groups))

    def lane_rows(self, number: int) -> int:
        """Return the number of rows of a lane."""
        return self.lane_start(number + 1) - self.lane_start(number)

    def lane(self, number: int) -> "Lane":
        return Lane(self, number)

    def lane_start(self, number: int) -> int:
        """Return where a lane begins on the tape; the first rows % lanes lanes have one row more."""
        return number * (self.rows // self.lanes) + min(number, self.rows % self.lanes)

    def share(self, start: int, stop: int, rank: int, world: int) -> Iterator[LaneRange]:
        """Yield one worker's share of positions [start, stop), lane by lane; the shares of all workers are disjoint.

        If `world` divides the number of lanes, each worker keeps to its own lanes: position p belongs to worker
        p % world, so shares differ by at most one row. Otherwise all shares but the last are of equal size, and
        neighbours read the same row groups.
        """
        stop = min(stop, self.rows)
        if self.lanes % world == 0:
            for lane in range(rank, self.lanes, world):
                begin, end = self._in_lane(lane, start), self._in_lane(lane, stop)
                if begin < end:
                    yield LaneRange(lane, begin, end)
            return
        count = max(0, stop - start)
        share_rows = -(-count // world)
        yield from self.lane_ranges(start, stop, rank * share_rows, min((rank + 1) * share_rows, count))

    def _in_lane(self, lane: int, position: int) -> int:
        """Return the number of rows of a lane before a position."""
        return -((lane - position) // self.lanes)

    def lane_ranges(self, start: int, stop: int, at: int, last: int) -> Iterator[LaneRange]:
        """Lay the rows of positions [start, stop) out lane after lane, and yield those from `at` to `last`."""
        stop, before = min(stop, self.rows), 0
        for lane in range(self.lanes):
            begin, end = self._in_lane(lane, start), self._in_lane(lane, stop)
            first, upto = max(at - before, 0), min(last - before, end - begin)
            if first < upto:
                yield LaneRange(lane, begin + first, begin + upto)
            before += end - begin
            if before >= last:
                return

    @cached_property
    def _tape(self) -> tuple[Ints, Ints]:
        """The row groups in the order of the tape, and the row at which each begins (and the last one ends)."""
        parts = int(self.row_groups.part.max()) + 1 if len(self.row_groups) else 0
        place = np.empty(parts, np.int64)
        place[shuffled(parts, self.seed, self.epoch, _TAPE)] = np.arange(parts)
        drawn = np.empty(len(self.row_groups), np.int64)
        drawn[shuffled(len(self.row_groups), self.seed, self.epoch, _TAPE, 1)] = np.arange(len(self.row_groups))
        order = np.lexsort((drawn, place[self.row_groups.part] // self.shape.units))
        return order, np.concatenate([[0], np.cumsum(self.row_groups.rows[order])])


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of a row group, which is given by its number in RowGroups."""

    row_group: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Rows that are shuffled together: rows [start, stop) of a lane."""

    start: int
    stop: int
    ranges: tuple[RowRange, ...]
    seed: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def places(self) -> Ints:
        """Return the place in the window of each row, with the rows numbered range after range."""
        return shuffled(len(self), *self.seed)


class Lane:
    """One of the sequences that an epoch reads side by side."""

    def __init__(self, order: EpochOrder, number: int) -> None:
        start, stop = order.lane_start(number), order.lane_start(number + 1)
        row_groups, begins = order._tape
        first, last = np.searchsorted(begins, [start, stop - 1], side="right") - 1
        self._row_groups = row_groups[first : last + 1]
        self._begins = np.clip(begins[first : last + 2], start, stop) - start
        self._offset = start - int(begins[first])
        # The first windows differ in length, so that lanes do not all need a new window at once.
        group = order.shape.row_groups
        opening = group - number * group // order.lanes
        cuts = np.arange(opening, len(self._row_groups), group)
        self._cuts = np.concatenate([[0], cuts, [len(self._row_groups)]])
        self._starts = self._begins[self._cuts]
        self._seed = (order.seed, order.epoch, _WINDOW, number)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def window_at(self, row: int) -> Window:
        """Return the window that holds a row of the lane."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        first, last = int(self._cuts[number]), int(self._cuts[number + 1])
        ranges = []
        for at in range(first, last):
            skipped = self._offset if at == 0 else 0
            rows = int(self._begins[at + 1] - self._begins[at])
            if not rows:
                continue
            ranges.append(RowRange(int(self._row_groups[at]), skipped, skipped + rows))
        return Window(int(self._starts[number]), int(self._starts[number + 1]), tuple(ranges), (*self._seed, number))


def shuffled(count: int, *seed: int) -> Ints:
    """Return a permutation made from raw random bits, which are the same in every version of numpy."""
    bits = np.random.Philox(np.random.SeedSequence(list(seed)))
    return np.argsort(bits.random_raw(count), kind="stable")
