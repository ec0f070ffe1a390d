"""Images as a source of rows: an engine, collocated or online, encodes the rows that a worker needs.

The rows of each window are encoded in slices. A batch does not depend on how many encoders there are, which of them
encodes a row, or which of them dies. Rows of a window that are consumed, or belong to another trainer, are not encoded.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.outcomes import Outcome
from sdp.train.data.columns import RowColumns
from sdp.train.data.images import ImagesDataset, Slice
from sdp.train.data.order import Ints, Route, Window
from sdp.train.data.reader import in_flight
from sdp.train.data.rows import PAD, Buffers, Rows
from sdp.train.data.weights import RowWeights, Weigh

Engine = Callable[[Iterator[Slice]], Generator[Rows]]
"""Yields the encoded rows of each slice, in order, and consumes a bounded number of slices ahead of the results."""
Submit = Callable[[Slice | None], Callable[[], Any]]
"""Submits a slice, or None for the empty caption; returns a function that waits for the rows or the embedding."""


def online(submit: Submit, ahead: int) -> Engine:
    """Return an engine whose encoders run elsewhere.

    A slice is submitted only when an earlier one has been used, so encoders are never more than `ahead` slices ahead of
    a trainer, however many or fast they are. This bounds memory.
    """
    return lambda slices: in_flight(map(submit, slices), ahead)


@dataclass(frozen=True)
class EncodedRows:
    """The rows of an images dataset."""

    dataset: ImagesDataset
    engine: Engine
    load_weights: Callable[[], Weigh] = RowWeights
    """Returns the rows' weights; called at the beginning of each epoch."""

    def columns(self, _: int) -> RowColumns:
        """Return the columns of the rows."""
        return self.dataset.columns

    def loaded(self, windows: Iterator[Window], route: Route, buffers: Buffers) -> Generator[tuple[Window, Rows]]:
        """Yield the windows with their rows, in order."""
        weigh = self.load_weights()
        requested: deque[tuple[Window, list[Ints]]] = deque()
        """Windows being encoded, with the places of each slice's rows in them."""
        with closing(self.engine(self._slices(windows, route, requested))) as results:
            for first in results:
                window, places = requested.popleft()
                into = buffers.take(len(window), self.dataset.columns)
                into.rows[:], into.weights[:] = PAD, 0
                bad: dict[int, Outcome] = {}
                for number, slice_places in enumerate(places):
                    encoded = next(results) if number else first
                    for target, values in zip(into.arrays, encoded.arrays, strict=True):
                        target[slice_places] = values
                    bad |= encoded.bad
                into.weights[:] *= weigh(into.rows)
                yield window, replace(into, bad=bad)

    def _slices(
        self, windows: Iterator[Window], route: Route, requested: deque[tuple[Window, list[Ints]]]
    ) -> Iterator[Slice]:
        """Yield the slices of some windows, and note each window with the places of its slices' rows."""
        data = self.dataset
        for window in windows:
            needed, places, at = _needed(window, route), window.places(), 0
            epoch = window.lane.order.epoch
            slices: list[tuple[Slice, Ints]] = []
            for row_range in window.ranges:
                number = row_range.row_group
                uri = data.storage.uri_of(data.paths[int(data.row_groups.part[number])])
                group, group_rows = int(data.row_groups.group[number]), int(data.row_groups.rows[number])
                for skip in range(row_range.start, row_range.stop, data.slice_rows):
                    own = places[at : at + min(data.slice_rows, row_range.stop - skip)]
                    at += len(own)
                    if needed[own].any():
                        slices.append((Slice.of(uri, group, group_rows, skip, epoch, needed[own]), own))
            requested.append((window, [own for _, own in slices]))
            for data_slice, _ in slices:
                yield data_slice


def _needed(window: Window, route: Route) -> NDArray[np.bool_]:
    """Return a mask of the rows of a window that a worker needs: the others are consumed, or another worker's."""
    needed, order = np.zeros(len(window), np.bool_), window.lane.order
    first, last = (row * order.lanes + window.lane.number for row in (window.start, window.stop - 1))
    begin = route.position + max(0, first - route.position) // route.batch_size * route.batch_size
    for start in range(begin, last + 1, route.batch_size):
        for lane_range in order.share(start, start + route.batch_size, route.rank, route.world):
            if lane_range.lane is window.lane:
                needed[lane_range.within(window)] = True
    return needed
