"""Several datasets as one: the rows of each dataset at each position of an epoch.

Positions are dealt to the datasets in a fixed pattern that holds each in proportion to its weight, evenly spread. So
the position alone decides how much of each dataset an epoch has consumed. An epoch is one pass over the first dataset.
Passes over the others continue from epoch to epoch; the number of a pass is that dataset's own epoch. Checkpoints
record where in its pass each dataset was when the epoch began, since datasets may change between epochs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sdp.model.checkpoints import DatasetPosition, EpochStart
from sdp.train.data.order import EpochOrder, LaneRange, Route, RowGroups, Shuffle

_PATTERN = 4096
"""Length of the pattern in positions; weights are exact to this fraction."""


@dataclass(frozen=True, slots=True)
class MixtureSpan:
    """Consecutive positions in the order of one dataset."""

    dataset: int
    epoch: int
    """The dataset's own epoch."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Mixture:
    """The datasets' sizes in rows, and the number of samples of each for one sample of the first."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @cached_property
    def rows(self) -> int:
        """Positions of an epoch: one pass over the first dataset."""
        rounds, nth = divmod(self.sizes[0] - 1, int(self._counts[-1, 0]))
        return rounds * len(self._pattern) + int(np.flatnonzero(self._pattern == 0)[nth]) + 1

    def spans(self, epoch: int, start: int, stop: int, places: Sequence[DatasetPosition] = ()) -> list[MixtureSpan]:
        """Return positions [start, stop) of an epoch as spans of the datasets.

        `places` is where the datasets were when the epoch began; without it they are taken as unchanged since epoch 0.
        """
        if len(self.sizes) == 1:
            return [MixtureSpan(0, epoch, start, min(stop, self.rows))]
        begins, ends = self._counts_before(start), self._counts_before(min(stop, self.rows))
        spans = []
        for dataset, (first, consumed, size) in enumerate(self._places(epoch, places)):
            at, last = consumed + int(begins[dataset]), consumed + int(ends[dataset])
            while at < last:
                passes, position = divmod(at, size)
                count = min(last - at, size - position)
                spans.append(MixtureSpan(dataset, first + passes, position, position + count))
                at += count
        return spans

    def after(self, epoch: int, places: Sequence[DatasetPosition] = ()) -> tuple[DatasetPosition, ...]:
        """Return where the datasets are at the end of an epoch."""
        ends = []
        for place, taken in zip(self._places(epoch, places), self._counts_before(self.rows).tolist(), strict=True):
            first, consumed, size = place
            passes, position = divmod(consumed + taken, size)
            ends.append((first + passes, position, size))
        return tuple(ends)

    def _places(self, epoch: int, places: Sequence[DatasetPosition]) -> list[DatasetPosition]:
        """Return where the datasets are at the beginning of an epoch; one that has changed begins a new pass."""
        if not places:
            per_epoch = self._counts_before(self.rows).tolist()
            places = [(*divmod(epoch * taken, size), size) for taken, size in zip(per_epoch, self.sizes, strict=True)]
        return [
            (number, consumed, size) if rows == size or not consumed else (number + 1, 0, size)
            for (number, consumed, rows), size in zip(places, self.sizes, strict=True)
        ]

    def _counts_before(self, position: int) -> NDArray[np.int64]:
        """Return the number of positions before this one that belong to each dataset."""
        rounds, rest = divmod(position, len(self._pattern))
        counts: NDArray[np.int64] = rounds * self._counts[-1] + self._counts[rest]
        return counts

    @cached_property
    def _pattern(self) -> NDArray[np.int64]:
        """The dataset of each position: the n-th of a dataset's m positions is at (n + 1/2) / m of the pattern."""
        shares = np.array(self.weights) / sum(self.weights)
        counts = np.maximum(1, np.round(shares * _PATTERN)).astype(np.int64)
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        datasets = np.repeat(np.arange(len(counts)), counts)
        return datasets[np.lexsort((datasets, due))]

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """The number of positions of each dataset (column) before each position of the pattern (line)."""
        belongs = self._pattern[:, None] == np.arange(len(self.sizes))
        return np.concatenate([np.zeros((1, len(self.sizes)), np.int64), np.cumsum(belongs, axis=0)])


def shares_of(spans: Sequence[MixtureSpan], rank: int, world: int) -> list[tuple[MixtureSpan, int, int]]:
    """Return one worker's share of some spans: for each span, the first of its rows and the end.

    All shares but the last have the same size.
    """
    count = sum(map(len, spans))
    share_rows = -(-count // world)
    first, last, before, share = rank * share_rows, min((rank + 1) * share_rows, count), 0, []
    for span in spans:
        at, to = max(first - before, 0), min(last - before, len(span))
        if at < to:
            share.append((span, at, to))
        before += len(span)
    return share


@dataclass(frozen=True)
class MixturePlan:
    """The plan of one dataset, or of several that are mixed."""

    row_groups: tuple[RowGroups, ...]
    """Those of each dataset."""
    seed: int
    shuffle: Shuffle
    weights: tuple[float, ...] = (1.0,)
    granule: None = None
    """None, since all rows have one shape."""
    shapes: int = 1
    """The number of shapes of latents."""

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture(tuple(int(groups.rows.sum()) for groups in self.row_groups), self.weights)

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self.mixture.rows

    def positions(self, _: EpochStart) -> int:
        """Return the number of positions in an epoch."""
        return self.rows

    def after(self, epoch: int, start: EpochStart) -> EpochStart:
        """Return the start of the next epoch."""
        return start if len(self.row_groups) == 1 else replace(start, places=self.mixture.after(epoch, start.places))

    def steps(self, epoch: int, start: EpochStart, route: Route) -> Iterator[list[LaneRange]]:
        """Yield a worker's rows of each step to the epoch's end. All workers have the same number of steps."""
        shuffle = self.shuffle.with_lanes(start.lanes)
        passes: dict[int, EpochOrder] = {}

        def order_of(span: MixtureSpan) -> EpochOrder:
            number = span.dataset
            if number not in passes or passes[number].epoch != span.epoch:
                passes[number] = EpochOrder(self.seed, span.epoch, self.row_groups[number], shuffle, number)
            return passes[number]

        rank, world = route.rank, route.world
        for first in range(route.position, self.rows, route.batch_size):
            spans = self.mixture.spans(epoch, first, first + route.batch_size, start.places)
            if len(self.row_groups) == 1:
                (span,) = spans
                yield list(order_of(span).share(span.start, span.stop, rank, world))
            else:
                shares = shares_of(spans, rank, world)
                yield [r for span, at, to in shares for r in order_of(span).lane_ranges(span.start, span.stop, at, to)]
