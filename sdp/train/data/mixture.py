"""Several datasets as one: which rows of which are at a position of an epoch.

Positions are dealt out to the datasets in a fixed pattern that holds as many of each as its weight says, evenly spread.
So how much of each dataset an epoch has consumed is a function of the position alone, whoever and however many read it.
An epoch is a pass over the first dataset. The others go round at a pace of their own, from epoch to epoch: each pass
over one of them has a number, which is its own epoch. Checkpoints keep where in its pass each one was when the epoch
began, since datasets may change between epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sdp.model.checkpoints import Place

_PATTERN = 4096
"""Positions after which the pattern begins again: weights are exact to this fraction."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions in the order of one dataset."""

    dataset: int
    epoch: int
    """Its own."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Mixture:
    """Datasets of so many rows, and how many samples of each there are for one of the first."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @cached_property
    def rows(self) -> int:
        """Positions in an epoch: until the first dataset has been gone through."""
        rounds, nth = divmod(self.sizes[0] - 1, int(self._counts[-1, 0]))
        return rounds * len(self._pattern) + int(np.flatnonzero(self._pattern == 0)[nth]) + 1

    def spans(self, epoch: int, start: int, stop: int, places: Sequence[Place] = ()) -> list[Span]:
        """Return what positions [start, stop) of an epoch are, dataset by dataset.

        `places` is where the datasets were when the epoch began; without it they have not changed since the first.
        """
        if len(self.sizes) == 1:
            return [Span(0, epoch, start, min(stop, self.rows))]
        begins, ends = self._upto(start), self._upto(min(stop, self.rows))
        spans = []
        for dataset, (first, had, size) in enumerate(self._places(epoch, places)):
            at, last = had + int(begins[dataset]), had + int(ends[dataset])
            while at < last:
                passes, position = divmod(at, size)
                count = min(last - at, size - position)
                spans.append(Span(dataset, first + passes, position, position + count))
                at += count
        return spans

    def after(self, epoch: int, places: Sequence[Place] = ()) -> tuple[Place, ...]:
        """Return where the datasets are at the end of an epoch."""
        ends = []
        for (first, had, size), taken in zip(self._places(epoch, places), self._upto(self.rows).tolist(), strict=True):
            passes, position = divmod(had + taken, size)
            ends.append((first + passes, position, size))
        return tuple(ends)

    def _places(self, epoch: int, places: Sequence[Place]) -> list[Place]:
        """Return where the datasets are at the beginning of an epoch, in passes over what they are now."""
        if not places:
            whole = self._upto(self.rows).tolist()
            places = [(*divmod(epoch * taken, size), size) for taken, size in zip(whole, self.sizes, strict=True)]
        return [
            (number, had, size) if rows == size or not had else (number + 1, 0, size)
            for (number, had, rows), size in zip(places, self.sizes, strict=True)
        ]

    def _upto(self, position: int) -> NDArray[np.int64]:
        """How many of the first positions are each dataset's."""
        rounds, rest = divmod(position, len(self._pattern))
        counted: NDArray[np.int64] = rounds * self._counts[-1] + self._counts[rest]
        return counted

    @cached_property
    def _pattern(self) -> NDArray[np.int64]:
        """Which dataset each position is, evenly spread: a dataset's n-th of m is due when (n + 1/2) / m is over."""
        shares = np.array(self.weights) / sum(self.weights)
        counts = np.maximum(1, np.round(shares * _PATTERN)).astype(np.int64)
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        datasets = np.repeat(np.arange(len(counts)), counts)
        return datasets[np.lexsort((datasets, due))]

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """How many of the pattern's first positions are each dataset's."""
        each = self._pattern[:, None] == np.arange(len(self.sizes))
        return np.concatenate([np.zeros((1, len(self.sizes)), np.int64), np.cumsum(each, axis=0)])


def shares_of(spans: Sequence[Span], rank: int, world: int) -> list[tuple[Span, int, int]]:
    """What of some spans falls to one of `world` workers: of each the rows from the one number to the other.

    Shares are equal but for the last ones, which may be shorter.
    """
    count = sum(map(len, spans))
    each = -(-count // world)
    first, last, before, found = rank * each, min((rank + 1) * each, count), 0, []
    for span in spans:
        at, to = max(first - before, 0), min(last - before, len(span))
        if at < to:
            found.append((span, at, to))
        before += len(span)
    return found
