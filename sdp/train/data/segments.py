"""What a stream of an epoch is made of: segments of its order, each some windows of rows to be read together.

The order is the tape of the direct reader (see `order`), cut into segments of equal length. Segments are delivered one
after the other; inside a segment rows come in any order to any worker. So what is consumed is not a position: it is all
segments before one, and of that one the rows that the checkpoint's ledger has. Workers take equally many rows to within
one, so none of them begins a segment before all have finished the one before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.concurrently import ordered_map
from sdp.train.data.latents import GroupReader, LatentsDataset
from sdp.train.data.loading import Kept, Loader
from sdp.train.data.order import EpochOrder, Ints, OrderShape, Piece, shuffled
from sdp.train.data.rows import Rows, empty_rows
from sdp.train.data.weights import Weigh

_STREAM = 3
_WINDOW_BYTES = 48_000_000
"""The most of a window, which travels as one block, where one row group is not more."""


@dataclass(frozen=True)
class Segment:
    """Rows of the tape that are read at one time."""

    number: int
    pieces: tuple[Piece, ...]
    kept: tuple[Kept, ...]
    """Of each piece the rows that are left."""

    @property
    def counts(self) -> list[int]:
        """Rows of each piece that are left."""
        pairs = zip(self.pieces, self.kept, strict=True)
        return [len(piece) if kept is None else int(kept.sum()) for piece, kept in pairs]


@dataclass(frozen=True)
class WindowOfGroups:
    """Rows that one task reads and permutes. It travels to the task, and so knows no more than it has to."""

    dataset: LatentsDataset
    """Of these row groups alone."""
    pieces: tuple[Piece, ...]
    kept: tuple[Kept, ...]
    rows: int
    padding: int
    """Rows of weight 0 to be added, so that all workers get equally many."""
    seed: tuple[int, ...]
    epoch: int

    @property
    def bytes(self) -> int:
        return (self.rows + self.padding) * (12 + sum(column.width for column in self.dataset.columns))

    def load(self, weigh: Weigh) -> Rows:
        """Read it."""
        loader = Loader(GroupReader(self.dataset), weigh, self.seed[0], self.epoch)
        into = empty_rows(self.rows + self.padding, self.dataset.columns)
        loader.load(self.pieces, shuffled(self.rows, *self.seed), into.slice(0, self.rows), self.kept)
        into.rows[self.rows :], into.weights[self.rows :] = -1, 0
        for values in (into.latents, into.text):
            values[self.rows :] = np.zeros(1, values.dtype)
        return into


@dataclass(frozen=True)
class EpochLeft:
    """The segments, of `rows` rows each, that an epoch has left."""

    order: EpochOrder
    rows: int
    first: int = 0
    """The number of the first one."""
    kept: tuple[Kept, ...] | None = None
    """What of it is left, where that is not all."""

    @property
    def counts(self) -> list[int]:
        """Rows of each segment."""
        starts = range(self.first * self.rows, self.order.rows, self.rows)
        counts = [min(self.rows, self.order.rows - start) for start in starts]
        if self.kept is not None:
            counts[0] = sum(self.segment(0).counts)
        return counts

    def segment(self, nth: int) -> Segment:
        """One of them, from 0 on."""
        number = self.first + nth
        pieces = stretch_of(self.order, self.rows, number)
        return Segment(number, pieces, self.kept if nth == 0 and self.kept is not None else (None,) * len(pieces))


def stretch_of(order: EpochOrder, rows: int, number: int) -> tuple[Piece, ...]:
    return tuple(order.stretch(number * rows, (number + 1) * rows))


def left_of(order: EpochOrder, rows: int, dataset: LatentsDataset, consumed: BitMap64, weigh: Weigh) -> EpochLeft:
    """What an epoch has left after some addresses have been consumed.

    Looks for the last segment of which anything is consumed; addresses are read of the row groups that may have some.
    """
    if not consumed:
        return EpochLeft(order, rows)
    reader = GroupReader(dataset)
    maybe = _Maybe(dataset, consumed)
    for number in reversed(range(-(-order.rows // rows))):
        pieces = stretch_of(order, rows, number)
        if not any(map(maybe, pieces)):
            continue
        kept: list[Kept] = []
        touched = False
        found = ordered_map(lambda piece: reader.addresses(piece) if maybe(piece) else None, pieces)
        for addresses in found:
            done = _among(addresses, consumed) if addresses is not None else None
            if addresses is None or done is None or not done.any():
                kept.append(None)
                continue
            touched = True
            # What weighs nothing is in no ledger, and need not be delivered either.
            kept.append(~done & (weigh(addresses) > 0))
        if touched:
            left = EpochLeft(order, rows, number, tuple(kept))
            return left if sum(left.segment(0).counts) else EpochLeft(order, rows, number + 1)
    return EpochLeft(order, rows)


class _Maybe:
    """Whether any row of a piece may be consumed, by the range that its addresses are in."""

    def __init__(self, dataset: LatentsDataset, consumed: BitMap64) -> None:
        self._dataset, self._consumed = dataset, consumed
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, piece: Piece) -> bool:
        span = int(self._dataset.low[piece.block]), int(self._dataset.high[piece.block])
        if span not in self._known:
            self._known[span] = self._consumed.range_cardinality(*span) > 0
        return self._known[span]


def _among(rows: Ints, consumed: BitMap64) -> NDArray[np.bool_]:
    """Which of some addresses are consumed."""
    if not len(rows):
        return np.zeros(0, np.bool_)
    span = BitMap64()
    span.add_range(int(rows.min()), int(rows.max()) + 1)
    return np.isin(rows, np.array((consumed & span).to_array(), np.int64))


def windows(
    dataset: LatentsDataset, segment: Segment, order: EpochOrder, shape: OrderShape, world: int
) -> Iterator[WindowOfGroups]:
    """A segment as tasks, each of row groups from all over it."""
    counts = segment.counts
    padding = -sum(counts) % world
    seed = (order.seed, order.epoch, _STREAM, segment.number)
    drawn = [int(n) for n in shuffled(len(counts), *seed) if counts[n]]
    row = 12 + sum(column.width for column in dataset.columns)
    together: list[list[int]] = []
    size = 0
    for n in drawn:
        if not together or len(together[-1]) == shape.row_groups or (size + counts[n]) * row > _WINDOW_BYTES:
            together.append([])
            size = 0
        together[-1].append(n)
        size += counts[n]
    for number, some in enumerate(together):
        pieces = [segment.pieces[n] for n in some]
        yield WindowOfGroups(
            dataset.only([piece.block for piece in pieces]),
            tuple(Piece(at, piece.start, piece.stop) for at, piece in enumerate(pieces)),
            tuple(segment.kept[n] for n in some),
            sum(counts[n] for n in some),
            padding if number == len(together) - 1 else 0,
            (*seed, 1, number),
            order.epoch,
        )
