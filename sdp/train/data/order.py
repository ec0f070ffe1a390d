"""The order of an epoch: a pure function of (seed, epoch) and the dataset, whatever the number of workers.

    tape      all row groups of the dataset: the units are shuffled, then the row groups of a few units at a time
    lanes     the tape, cut into parts of equal length; the epoch takes one row from each lane in turn
    windows   a lane, cut into a few row groups each, whose rows are shuffled together
    position  a row's place in the epoch: position p is row p // lanes of lane p % lanes

So a batch mixes rows of the whole dataset, while each row group is read once. An epoch that begins with more workers
than lanes has a lane for each worker, and keeps these lanes if the number of workers changes.

The position alone tells which rows are consumed: those at lower positions. Any number of workers continues from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

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
        """Return the row groups of a column with a list for each part: of rows, or of structs as in a manifest.

        Millions of them become arrays without a Python object for each.
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
class Shuffle:
    """The width of an epoch's mixing. A run keeps these numbers, since they decide the order."""

    lanes: int = 16
    """The most lanes. If the number of trainers divides it, no row group is read twice."""
    units: int = 4
    """Units whose row groups are shuffled together: 120,000 rows of 256 px."""
    row_groups: int = 4
    """Row groups of a window."""

    def with_lanes(self, lanes: int) -> "Shuffle":
        """Return the same with the lanes that an epoch began with; 0 changes nothing."""
        return replace(self, lanes=lanes or self.lanes)


@dataclass(frozen=True, slots=True)
class Route:
    """A worker's way through an epoch: from a position on, its share of each step of `batch_size` positions."""

    position: int
    batch_size: int
    rank: int = 0
    world: int = 1

    @property
    def share(self) -> int:
        """The most rows of a worker in a step."""
        return -(-self.batch_size // self.world)


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """All positions of one epoch."""

    seed: int
    epoch: int
    row_groups: RowGroups
    shuffle: Shuffle
    dataset: int = 0
    """The dataset's number in the run."""

    @cached_property
    def rows(self) -> int:
        """The number of positions."""
        return int(self.row_groups.rows.sum())

    @cached_property
    def lanes(self) -> int:
        """The number of lanes: as configured, or fewer if a small dataset cannot fill a window for each."""
        return max(1, min(self.shuffle.lanes, len(self.row_groups) // self.shuffle.row_groups))

    def lane_rows(self, number: int) -> int:
        """Return the number of rows of a lane."""
        return self.lane_start(number + 1) - self.lane_start(number)

    def lane(self, number: int) -> "Lane":
        """Return a lane, the same object each time."""
        return self._all_lanes[number]

    @cached_property
    def _all_lanes(self) -> "list[Lane]":
        return [Lane(self, number) for number in range(self.lanes)]

    def lane_start(self, number: int) -> int:
        """Return where a lane begins on the tape; the first rows % lanes lanes have one row more."""
        return number * (self.rows // self.lanes) + min(number, self.rows % self.lanes)

    def share(self, start: int, stop: int, rank: int, world: int) -> "Iterator[LaneRange]":
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
                    yield LaneRange(self.lane(lane), begin, end)
            return
        count = max(0, stop - start)
        share_rows = -(-count // world)
        yield from self.lane_ranges(start, stop, rank * share_rows, min((rank + 1) * share_rows, count))

    def _in_lane(self, lane: int, position: int) -> int:
        """Return the number of rows of a lane before a position."""
        return -((lane - position) // self.lanes)

    def lane_ranges(self, start: int, stop: int, at: int, last: int) -> "Iterator[LaneRange]":
        """Lay the rows of positions [start, stop) out lane after lane, and yield those from `at` to `last`."""
        stop, before = min(stop, self.rows), 0
        for lane in range(self.lanes):
            begin, end = self._in_lane(lane, start), self._in_lane(lane, stop)
            first, upto = max(at - before, 0), min(last - before, end - begin)
            if first < upto:
                yield LaneRange(self.lane(lane), begin + first, begin + upto)
            before += end - begin
            if before >= last:
                return

    @cached_property
    def _tape(self) -> tuple[Ints, Ints]:
        """The row groups in the order of the tape, and the row at which each begins (and the last one ends)."""
        parts = int(self.row_groups.part.max()) + 1 if len(self.row_groups) else 0
        place = np.argsort(shuffled(parts, self.seed, self.epoch, _TAPE))
        drawn = np.argsort(shuffled(len(self.row_groups), self.seed, self.epoch, _TAPE, 1))
        order = np.lexsort((drawn, place[self.row_groups.part] // self.shuffle.units))
        return order, np.concatenate([[0], np.cumsum(self.row_groups.rows[order])])


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of a row group, which is given by its number in RowGroups."""

    row_group: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Window:
    """Rows [start, stop) of a lane, which are shuffled together."""

    lane: "Lane"
    number: int
    start: int
    stop: int
    ranges: tuple[RowRange, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def places(self) -> Ints:
        """Return the place in the window of each row, with the rows numbered range after range."""
        order = self.lane.order
        return shuffled(len(self), order.seed, order.epoch, _WINDOW, self.lane.number, self.number)


class Lane:
    """One of the sequences that an epoch reads side by side."""

    def __init__(self, order: EpochOrder, number: int) -> None:
        self.order, self.number = order, number
        start, stop = order.lane_start(number), order.lane_start(number + 1)
        row_groups, begins = order._tape
        first, last = np.searchsorted(begins, [start, stop - 1], side="right") - 1
        self._row_groups = row_groups[first : last + 1]
        self._begins = np.clip(begins[first : last + 2], start, stop) - start
        self._offset = start - int(begins[first])
        # The first windows differ in length, so that lanes do not all need a new window at once.
        group = order.shuffle.row_groups
        opening = group - number * group // order.lanes
        cuts = np.arange(opening, len(self._row_groups), group)
        self._cuts = np.concatenate([[0], cuts, [len(self._row_groups)]])
        self._starts = self._begins[self._cuts]

    @property
    def key(self) -> tuple[int, int]:
        """The dataset and the number, which the same lane of the dataset's next epoch has, too."""
        return self.order.dataset, self.number

    def window_at(self, row: int) -> Window:
        """Return the window that holds a row of the lane."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        ranges = []
        for at in range(int(self._cuts[number]), int(self._cuts[number + 1])):
            skipped = self._offset if at == 0 else 0
            if rows := int(self._begins[at + 1] - self._begins[at]):
                ranges.append(RowRange(int(self._row_groups[at]), skipped, skipped + rows))
        return Window(self, number, int(self._starts[number]), int(self._starts[number + 1]), tuple(ranges))


@dataclass(frozen=True, slots=True)
class LaneRange:
    """Consecutive rows of a lane."""

    lane: Lane
    start: int
    stop: int

    def within(self, window: Window) -> slice:
        """Return these rows' places in a window of the lane; none if it has none of them."""
        return slice(max(0, self.start - window.start), max(0, self.stop - window.start))


def windows_of(steps: Iterable[Sequence[LaneRange]]) -> Iterator[Window]:
    """Yield the windows with the rows of some steps, in the order in which they are first needed."""
    newest: dict[tuple[int, int], Window] = {}
    for lane_range in chain.from_iterable(steps):
        lane, start = lane_range.lane, lane_range.start
        window = newest.get(lane.key)
        if window is not None and window.lane is lane:
            start = max(start, window.stop)
        while start < lane_range.stop:
            window = newest[lane.key] = lane.window_at(start)
            start = window.stop
            yield window


def shuffled(count: int, *seed: int) -> Ints:
    """Return a permutation made from raw random bits, which are the same in every version of numpy."""
    bits = np.random.Philox(np.random.SeedSequence(list(seed)))
    return np.argsort(bits.random_raw(count), kind="stable")
