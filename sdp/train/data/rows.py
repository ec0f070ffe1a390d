"""Rows in memory, before they become a batch."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.outcomes import Outcome
from sdp.train.data.columns import Items, RowColumns

PAD = -1
"""The address of padding; its weight is 0."""
_KEPT = 64
"""Consumed windows whose memory is kept."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory, one entry each; latents and text are raw bytes."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]
    latents: NDArray[np.void]
    text: NDArray[np.void]
    epoch: int | None = None
    """The epoch of their dataset, if it is not the run's."""
    bad: Mapping[int, Outcome] = field(default_factory=dict)
    """The reasons of bad rows, by address."""

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.rows, self.weights, self.latents, self.text

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, wanted: slice | NDArray[np.bool_]) -> "Rows":
        """Return some of the rows; those of a slice share its memory."""
        rows, weights, latents, text = (values[wanted] for values in self.arrays)
        return Rows(rows, weights, latents, text, self.epoch, self.bad)


def empty_rows(count: int, columns: RowColumns) -> Rows:
    """Allocate memory for `count` rows."""
    latents, text = (np.empty(count, np.dtype((np.void, column.width))) for column in columns)
    return Rows(np.empty(count, np.int64), np.empty(count, np.float32), latents, text)


def blank_rows(count: int, columns: RowColumns) -> Rows:
    """Return padding: rows of zeros with weight 0."""
    latents, text = (np.zeros(count, np.dtype((np.void, column.width))) for column in columns)
    return Rows(np.full(count, PAD, np.int64), np.zeros(count, np.float32), latents, text)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several, one after another."""
    rows, weights, latents, text = map(np.concatenate, zip(*(part.arrays for part in parts), strict=True))
    bad = {row: outcome for part in parts for row, outcome in part.bad.items()}
    return Rows(rows, weights, latents, text, bad=bad)


def items_of(values: NDArray[Any]) -> Items:
    """Return the bytes of each row of an array."""
    flat = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:]))
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]


class Buffers:
    """Memory of consumed windows for reuse: allocating pages costs as much as copying into them."""

    def __init__(self) -> None:
        self._free: defaultdict[RowColumns, deque[Rows]] = defaultdict(partial(deque, maxlen=_KEPT))

    def take(self, count: int, columns: RowColumns) -> Rows:
        free = self._free[columns]
        while free:
            if len(rows := free.popleft()) >= count:
                return rows[:count]
        return empty_rows(count, columns)

    def give_back(self, rows: Rows, columns: RowColumns) -> None:
        self._free[columns].append(Rows(*rows.arrays))
