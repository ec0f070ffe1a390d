"""Several datasets as one: which rows of which are at a position of an epoch.

Positions are dealt out to the datasets in a fixed pattern that holds as many of each as its weight says, evenly spread.
So how much of each dataset is consumed is a function of the position alone, whoever and however many read it, and the
position is the account of all of them. An epoch is a pass over the first dataset. The others go round at a pace of
their own, from epoch to epoch: each pass over one of them has a number, which is its own epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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

    def spans(self, epoch: int, start: int, stop: int) -> list[Span]:
        """What positions [start, stop) of an epoch are, dataset by dataset."""
        if len(self.sizes) == 1:
            return [Span(0, epoch, start, min(stop, self.rows))]
        begins, ends, whole = self._upto(start), self._upto(min(stop, self.rows)), self._upto(self.rows)
        found = []
        for dataset, size in enumerate(self.sizes):
            at, last = (epoch * int(whole[dataset]) + int(upto[dataset]) for upto in (begins, ends))
            while at < last:
                own, position = divmod(at, size)
                count = min(last - at, size - position)
                found.append(Span(dataset, own, position, position + count))
                at += count
        return found

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
