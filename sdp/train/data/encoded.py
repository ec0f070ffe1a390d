"""Batches of images that are encoded during training, by an engine: collocated or online.

The order is that of the direct reader, a pure function of (seed, epoch) and the dataset's row groups. So the position
alone tells which rows are consumed, and any number of trainers continues from it with exactly the rows that the epoch
has left. A batch does not depend on how many encoders there are, which of them encodes a row, or which of them dies.

Windows are requested in the order in which they are first needed, cut into slices; the engine works a bounded number of
slices ahead. Rows of a window that are consumed, or belong to another trainer, are not encoded.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sdp.datasets.outcomes import Outcome
from sdp.model.checkpoints import FIRST, EpochStart
from sdp.train.data.batch import Batch, Reader
from sdp.train.data.images import EncodedSlice, ImagesDataset, Slice
from sdp.train.data.order import EpochOrder, Lane, LaneRange, Shuffle, Window
from sdp.train.data.prefetch import prefetched
from sdp.train.data.rows import Buffers, Rows, batch_of
from sdp.train.data.weights import RowWeights, Weigh


class Engine(Protocol):
    """A way to transform and encode slices."""

    def encoded(self, slices: Iterator[Slice]) -> Iterator[EncodedSlice]:
        """Yield the result of each slice, in order, and consume a bounded number of slices ahead of the results."""


@dataclass(frozen=True)
class EncodedReader(Reader):
    """Reads the batches of one worker."""

    dataset: ImagesDataset
    engine: Engine
    seed: int
    shape: Shuffle
    rank: int
    world: int
    load_weights: Callable[[], Weigh] = RowWeights
    """Returns the rows' weights; called at the beginning of each epoch."""
    ahead: int = 4
    """Batches prepared ahead of need, in a thread; 0 makes each when it is needed."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """The device that batches are for: a GPU copies them from pinned memory without waiting."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self.dataset.rows

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart = FIRST) -> Iterator[Batch]:
        """Return this worker's share of every batch from a position to the epoch's end, padded to equal size."""
        if not self.ahead:
            return self._batches(epoch, position, batch_size, start)
        return prefetched(self._batches(epoch, position, batch_size, start), self.ahead, self.device)

    def _batches(self, epoch: int, position: int, batch_size: int, begin: EpochStart) -> Iterator[Batch]:
        shape = replace(self.shape, lanes=begin.lanes or self.shape.lanes)
        order = EpochOrder(self.seed, epoch, self.dataset.row_groups, shape)
        route = Route(order, position, batch_size, self.rank, self.world)
        share = -(-batch_size // self.world)
        lanes: dict[int, deque[tuple[Window, Rows]]] = {}
        bad: dict[int, Outcome] = {}
        buffers = Buffers(self.dataset.columns)
        with closing(self._windows(route, buffers)) as windows:
            for lane_ranges in route.steps():
                filled = []
                for lane_range in lane_ranges:
                    lane = lanes.setdefault(lane_range.lane, deque())
                    while not lane or lane[-1][0].stop < lane_range.stop:
                        window, rows, outcomes = next(windows)
                        lane.append((window, rows))
                        bad |= outcomes
                    while lane[0][0].stop <= lane_range.start:
                        buffers.give_back(lane.popleft()[1])
                    for window, rows in lane:
                        start, stop = max(lane_range.start, window.start), min(lane_range.stop, window.stop)
                        if start < stop:
                            filled.append(rows.slice(start - window.start, stop - window.start))
                batch = batch_of(self.dataset.columns, share, filled, pin=self.device.type == "cuda")
                if bad:
                    own = [bad.pop(row) for row in batch.rows[batch.weights == 0].tolist() if row in bad]
                    batch = replace(batch, bad=tuple(own))
                yield batch

    def _windows(self, route: "Route", buffers: Buffers) -> Generator[tuple[Window, Rows, dict[int, Outcome]]]:
        """Yield the encoded windows of a route, in order, each with its rows and the bad ones among them by address."""
        weigh = self.load_weights()
        requested: deque[tuple[Window, list[NDArray[np.int64]]]] = deque()
        # Windows being encoded, with the places of each slice's rows in them.
        results = self.engine.encoded(self._slices(route, requested))
        with closing(results):  # type: ignore[type-var]  # all engines are generators
            for first in results:
                window, places = requested.popleft()
                into = buffers.take(len(window))
                into.rows[:], into.weights[:] = -1, 0
                bad: dict[int, Outcome] = {}
                for number, slice_places in enumerate(places):
                    encoded = next(results) if number else first
                    into.rows[slice_places] = encoded.rows
                    into.weights[slice_places] = encoded.weights
                    into.latents[slice_places] = _items(encoded.latents)
                    into.text[slice_places] = _items(encoded.text)
                    bad |= {outcome.row: outcome for outcome in encoded.bad}
                into.weights[:] *= weigh(into.rows)
                yield window, into, bad

    def _slices(self, route: "Route", requested: deque[tuple[Window, list[NDArray[np.int64]]]]) -> Iterator[Slice]:
        """Yield the slices of a route's windows, and note each window with the places of its slices' rows."""
        data, epoch = self.dataset, route.order.epoch
        for lane, window in route.windows():
            needed, places, at = route.needed(lane, window), window.places(), 0
            slices: list[tuple[Slice, NDArray[np.int64]]] = []
            for row_range in window.ranges:
                row_group = row_range.row_group
                uri = data.storage.uri_of(data.paths[int(data.row_groups.part[row_group])])
                group = int(data.row_groups.group[row_group])
                for skip in range(row_range.start, row_range.stop, data.slice_rows):
                    count = min(data.slice_rows, row_range.stop - skip)
                    slice_places = places[at : at + count]
                    at += count
                    if needed[slice_places].any():
                        data_slice = Slice.of(
                            uri, group, int(data.row_groups.rows[row_group]), skip, epoch, needed[slice_places]
                        )
                        slices.append((data_slice, slice_places))
            requested.append((window, [slice_places for _, slice_places in slices]))
            for data_slice, _ in slices:
                yield data_slice


@dataclass(frozen=True)
class Route:
    """One worker's rows from a position to the end of the epoch."""

    order: EpochOrder
    position: int
    batch_size: int
    rank: int
    world: int

    def steps(self) -> Iterator[list[LaneRange]]:
        """Yield the worker's rows of each step."""
        for start in range(self.position, self.order.rows, self.batch_size):
            yield self._step(start)

    def windows(self) -> Iterator[tuple[int, Window]]:
        """Yield lanes and windows in the order in which the worker first needs them."""
        lanes: dict[int, tuple[Lane, int]] = {}
        for lane_ranges in self.steps():
            for lane_range in lane_ranges:
                lane, stop = lanes.get(lane_range.lane) or (self.order.lane(lane_range.lane), lane_range.start)
                while stop < lane_range.stop:
                    window = lane.window_at(max(stop, lane_range.start))
                    stop = window.stop
                    yield lane_range.lane, window
                lanes[lane_range.lane] = lane, stop

    def needed(self, lane: int, window: Window) -> NDArray[np.bool_]:
        """Return a mask of the rows of a window that the worker needs; the others are consumed or belong to another
        worker."""
        needed = np.zeros(len(window), np.bool_)
        lanes = self.order.lanes
        first, last = window.start * lanes + lane, (window.stop - 1) * lanes + lane
        behind = max(0, (first - self.position) // self.batch_size)
        for start in range(self.position + behind * self.batch_size, last + 1, self.batch_size):
            for lane_range in self._step(start):
                if lane_range.lane == lane:
                    needed[max(0, lane_range.start - window.start) : max(0, lane_range.stop - window.start)] = True
        return needed

    def _step(self, start: int) -> list[LaneRange]:
        return list(self.order.share(start, start + self.batch_size, self.rank, self.world))


def _items(values: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return bytes as one item per row, as the buffers hold them."""
    items: NDArray[np.void] = np.ascontiguousarray(values).view(np.dtype((np.void, values.shape[1])))[:, 0]
    return items
