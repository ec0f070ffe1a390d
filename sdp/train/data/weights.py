"""The weights of a dataset's rows: 0 for rows that are taken down, held out, repeated or beyond the limit."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sdp.datasets import tombstones
from sdp.datasets.draws import held_out
from sdp.datasets.repeated import Repeated
from sdp.storage import Storage

Weigh = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""Returns the weight of each address."""


@dataclass(frozen=True, slots=True)
class RowWeights:
    """Weight 1 for rows to train on, and 0 for others, which keep their places in the order."""

    holdout: float = 0.0
    limit: int | None = None
    taken_down: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Addresses, sorted."""
    repeated: Repeated | None = None
    """Rows of an images dataset with the same content as a lower address."""

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        counts = np.ones(len(rows), np.bool_)
        if self.limit is not None:
            counts &= rows < self.limit
        if self.holdout:
            counts &= ~held_out(rows, self.holdout)
        if len(self.taken_down):
            at = np.searchsorted(self.taken_down, rows.astype(np.uint64))
            counts &= self.taken_down[np.minimum(at, len(self.taken_down) - 1)] != rows.astype(np.uint64)
        if self.repeated is not None:
            counts &= ~self.repeated.mask(rows)
        return counts.astype(np.float32)


def row_weights(dataset: Storage, holdout: float, limit: int | None) -> RowWeights:
    """Return the current weights; takedowns are read again for each epoch."""
    rows = np.array(tombstones.load(dataset).rows.to_array(), np.uint64)
    return RowWeights(holdout, limit, np.sort(rows))
