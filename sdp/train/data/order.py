"""The order of an epoch: a pure function of (seed, epoch) and the dataset, whoever and how many read it.

Units come in an order drawn from (seed, epoch). Of several units at a time the row groups are laid out in a drawn
order: that is the tape. It is cut into `lanes` of equal length; the epoch takes one row from each lane in turn, so
position p is row p // lanes of lane p % lanes. Inside a lane, rows are permuted over several row groups at a time (a
window). So a batch mixes rows from all over the dataset, while whoever reads a lane reads whole row groups once. An
epoch that begins with more workers than lanes has a lane for each, and keeps them if another number goes on with it.

The position is the account: rows at positions below it are consumed, the others are not, and any number of workers can
go on from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_TAPE, _WINDOW, GRANULES = 1, 2, 4  # (3 was streaming's; never renumber: orders would change)


@dataclass(frozen=True, slots=True)
class OrderShape:
    """What decides the order beside (seed, epoch); it may not change within a run."""

    lanes: int = 16
    """Sequences that are read side by side: a multiple of the workers, or these read each other's row groups."""
    units: int = 4
    """Units whose row groups are mixed."""
    row_groups: int = 4
    """Row groups whose rows are permuted together."""


@dataclass(frozen=True)
class Blocks:
    """The row groups of a dataset: of which part, the how many-th in it, and its rows."""

    part: Ints
    group: Ints
    rows: Ints

    @staticmethod
    def of(parts: Sequence[Sequence[int]]) -> "Blocks":
        """From each part's list of its row groups' rows."""
        counts = [len(groups) for groups in parts]
        return Blocks(
            np.repeat(np.arange(len(parts)), counts),
            np.concatenate([np.arange(count) for count in counts] or [np.zeros(0, np.int64)]),
            np.array([rows for groups in parts for rows in groups], dtype=np.int64),
        )

    @staticmethod
    def listed(row_groups: pa.ChunkedArray) -> "Blocks":
        """From a manifest's column of row groups, without a Python object for each of millions."""
        lists = pa.concat_arrays(row_groups.chunks)
        counts = pc.list_value_length(lists).to_numpy().astype(np.int64)
        rows = pc.struct_field(lists.flatten(), "rows").to_numpy().astype(np.int64)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return Blocks(np.repeat(np.arange(len(counts)), counts), np.arange(len(rows)) - first, rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Take:
    """Consecutive rows of a lane."""

    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class EpochOrder:
    """All positions of one epoch."""

    seed: int
    epoch: int
    blocks: Blocks
    shape: OrderShape

    @cached_property
    def rows(self) -> int:
        """How many positions there are."""
        return int(self.blocks.rows.sum())

    @cached_property
    def lanes(self) -> int:
        """As many as wanted, where each has a window's worth of row groups; fewer of a small dataset."""
        return max(1, min(self.shape.lanes, len(self.blocks) // self.shape.row_groups))

    def lane_rows(self, number: int) -> int:
        """How many rows a lane has."""
        return self.lane_start(number + 1) - self.lane_start(number)

    def lane(self, number: int) -> "Lane":
        return Lane(self, number)

    def lane_start(self, number: int) -> int:
        """Where a lane begins on the tape: the first rows % lanes of them have one row more."""
        return number * (self.rows // self.lanes) + min(number, self.rows % self.lanes)

    def share(self, start: int, stop: int, rank: int, world: int) -> Iterator[Take]:
        """The rows of positions [start, stop) that fall to one of `world` workers, lane by lane.

        Together the workers take each position once. Where lanes can be shared out evenly, each worker keeps to its
        own: position p is worker p % world's, so shares differ by one row at most. Else they are equal but for the
        last ones, which may be shorter, and neighbours read the same row groups.
        """
        stop = min(stop, self.rows)
        if self.lanes % world == 0:
            for lane in range(rank, self.lanes, world):
                begin, end = self._in_lane(lane, start), self._in_lane(lane, stop)
                if begin < end:
                    yield Take(lane, begin, end)
            return
        count = max(0, stop - start)
        each = -(-count // world)
        yield from self.takes(start, stop, rank * each, min((rank + 1) * each, count))

    def _in_lane(self, lane: int, position: int) -> int:
        """How many rows of a lane come before a position."""
        return -((lane - position) // self.lanes)

    def takes(self, start: int, stop: int, at: int, last: int) -> Iterator[Take]:
        """Of the rows of positions [start, stop), laid out lane after lane, those from `at` to `last`."""
        stop, before = min(stop, self.rows), 0
        for lane in range(self.lanes):
            begin, end = self._in_lane(lane, start), self._in_lane(lane, stop)
            first, upto = max(at - before, 0), min(last - before, end - begin)
            if first < upto:
                yield Take(lane, begin + first, begin + upto)
            before += end - begin
            if before >= last:
                return

    @cached_property
    def _tape(self) -> tuple[Ints, Ints]:
        """The row groups in the order of the tape, and where on it each begins (and the last one ends)."""
        parts = int(self.blocks.part.max()) + 1 if len(self.blocks) else 0
        place = np.empty(parts, np.int64)
        place[shuffled(parts, self.seed, self.epoch, _TAPE)] = np.arange(parts)
        drawn = np.empty(len(self.blocks), np.int64)
        drawn[shuffled(len(self.blocks), self.seed, self.epoch, _TAPE, 1)] = np.arange(len(self.blocks))
        order = np.lexsort((drawn, place[self.blocks.part] // self.shape.units))
        return order, np.concatenate([[0], np.cumsum(self.blocks.rows[order])])


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a row group, by its number in Blocks."""

    block: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Rows that are permuted together: rows [start, stop) of a lane."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    seed: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def places(self) -> Ints:
        """Where each row goes: of the pieces' rows, laid one after the other, the n-th to places[n] in the window."""
        return shuffled(len(self), *self.seed)


class Lane:
    """One of the sequences that an epoch reads side by side."""

    def __init__(self, order: EpochOrder, number: int) -> None:
        self.number = number
        start, stop = order.lane_start(number), order.lane_start(number + 1)
        blocks, begins = order._tape
        first, last = np.searchsorted(begins, [start, stop - 1], side="right") - 1
        self._blocks = blocks[first : last + 1]
        self._begins = np.clip(begins[first : last + 2], start, stop) - start
        self._offset = start - int(begins[first])
        # Lanes begin with windows of different lengths, so that they do not all come to their ends at once.
        group = order.shape.row_groups
        opening = group - number * group // order.lanes
        cuts = np.arange(opening, len(self._blocks), group)
        self._cuts = np.concatenate([[0], cuts, [len(self._blocks)]])
        self._starts = self._begins[self._cuts]
        self._seed = (order.seed, order.epoch, _WINDOW, number)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def window_at(self, row: int) -> Window:
        """The window that holds a row of the lane."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        first, last = int(self._cuts[number]), int(self._cuts[number + 1])
        pieces = []
        for at in range(first, last):
            skipped = self._offset if at == 0 else 0
            rows = int(self._begins[at + 1] - self._begins[at])
            if not rows:
                continue
            pieces.append(Piece(int(self._blocks[at]), skipped, skipped + rows))
        return Window(int(self._starts[number]), int(self._starts[number + 1]), tuple(pieces), (*self._seed, number))


def shuffled(count: int, *seed: int) -> Ints:
    """A permutation out of the seed's raw bits, which no version of numpy changes."""
    bits = np.random.Philox(np.random.SeedSequence(list(seed)))
    return np.argsort(bits.random_raw(count), kind="stable")
