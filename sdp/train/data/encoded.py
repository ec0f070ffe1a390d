"""Batches of images that are encoded while training goes on: collocated or online, by whichever engine it is given.

The order is that of the direct reader: a pure function of (seed, epoch) and the dataset's row groups. So the position
is the account here too, any number of trainers goes on from it with exactly the rows that the epoch has left, and who
encodes what, how many encoders there are and which of them die makes no difference to a batch. A bitmap of consumed
rows, which a pipeline without a fixed order would have to go by, is not needed to resume; checkpoints hold one all the
same, for `sdp audit`.

Windows of the order are asked for in the order in which they are first needed, cut into slices, and the engine works
a bounded number of slices ahead. Rows of a window that are consumed already, or are another trainer's, are not encoded.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sdp.datasets.outcomes import Outcome
from sdp.model.checkpoints import FIRST, EpochStart
from sdp.train.data.batch import Batch
from sdp.train.data.images import EncodedSlice, ImagesDataset, Slice
from sdp.train.data.order import EpochOrder, Lane, OrderShape, Take, Window
from sdp.train.data.prefetch import prefetched
from sdp.train.data.rows import Buffers, Rows, batch_of
from sdp.train.data.weights import RowWeights, Weigh


class Engine(Protocol):
    """What transforms and encodes."""

    def encoded(self, slices: Iterator[Slice]) -> Iterator[EncodedSlice]:
        """What comes out for each slice, in their order; takes a bounded number of them ahead of what it gives."""


@dataclass(frozen=True)
class EncodedReader:
    """Batches of one worker."""

    dataset: ImagesDataset
    engine: Engine
    seed: int
    shape: OrderShape
    rank: int
    world: int
    weighing: Callable[[], Weigh] = RowWeights
    """Gives the rows' weights, asked for at the beginning of each epoch."""
    ahead: int = 2
    """Batches made before they are asked for."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """What batches are made for: a GPU copies them from page-locked memory without waiting."""

    @property
    def rows(self) -> int:
        """Positions in an epoch."""
        return self.dataset.rows

    def positions(self, start: EpochStart) -> int:  # noqa: ARG002
        """Return how many positions an epoch has."""
        return self.rows

    def after(self, epoch: int, start: EpochStart) -> EpochStart:  # noqa: ARG002 (one dataset goes nowhere)
        """Return what the epoch after this one begins with."""
        return start

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart = FIRST) -> Iterator[Batch]:
        """This worker's share of every batch from a position to the epoch's end, padded to equal size."""
        return prefetched(self._batches(epoch, position, batch_size, start), self.ahead, "sdp-batches", self.device)

    def _batches(self, epoch: int, position: int, batch_size: int, begin: EpochStart) -> Iterator[Batch]:
        shape = replace(self.shape, lanes=begin.lanes or self.shape.lanes)
        order = EpochOrder(self.seed, epoch, self.dataset.blocks, shape)
        route = Route(order, position, batch_size, self.rank, self.world)
        share = -(-batch_size // self.world)
        lanes: dict[int, deque[tuple[Window, Rows]]] = {}
        bad: dict[int, Outcome] = {}
        with closing(_Windows(self.dataset, route, self.engine, self.weighing())) as windows:
            for takes in route.steps():
                filled = []
                for take in takes:
                    lane = lanes.setdefault(take.lane, deque())
                    while not lane or lane[-1][0].stop < take.stop:
                        window, rows, outcomes = windows.next()
                        lane.append((window, rows))
                        bad |= outcomes
                    while lane[0][0].stop <= take.start:
                        windows.give_back(lane.popleft()[1])
                    for window, rows in lane:
                        start, stop = max(take.start, window.start), min(take.stop, window.stop)
                        if start < stop:
                            filled.append(rows.slice(start - window.start, stop - window.start))
                batch = batch_of(self.dataset.columns, share, filled, pin=self.device.type == "cuda")
                if bad:
                    found = [bad.pop(row) for row in batch.rows[batch.weights == 0].tolist() if row in bad]
                    batch = batch.with_bad(found)
                yield batch


@dataclass(frozen=True)
class Route:
    """What one worker takes from a position to the end of the epoch."""

    order: EpochOrder
    position: int
    batch_size: int
    rank: int
    world: int

    def steps(self) -> Iterator[list[Take]]:
        """Its rows of each step."""
        for start in range(self.position, self.order.rows, self.batch_size):
            yield self._takes(start)

    def windows(self) -> Iterator[tuple[int, Window]]:
        """The windows (and their lanes) in the order in which it first needs them."""
        lanes: dict[int, tuple[Lane, int]] = {}
        for takes in self.steps():
            for take in takes:
                lane, stop = lanes.get(take.lane) or (self.order.lane(take.lane), take.start)
                while stop < take.stop:
                    window = lane.window_at(max(stop, take.start))
                    stop = window.stop
                    yield take.lane, window
                lanes[take.lane] = lane, stop

    def needed(self, lane: int, window: Window) -> NDArray[np.bool_]:
        """Which rows of a window it takes; the others are consumed or another worker's."""
        mine = np.zeros(len(window), np.bool_)
        lanes = self.order.lanes
        first, last = window.start * lanes + lane, (window.stop - 1) * lanes + lane
        behind = max(0, (first - self.position) // self.batch_size)
        for start in range(self.position + behind * self.batch_size, last + 1, self.batch_size):
            for take in self._takes(start):
                if take.lane == lane:
                    mine[max(0, take.start - window.start) : max(0, take.stop - window.start)] = True
        return mine

    def _takes(self, start: int) -> list[Take]:
        return list(self.order.share(start, start + self.batch_size, self.rank, self.world))


class _Windows:
    """The windows of a route, one after the other."""

    def __init__(self, dataset: ImagesDataset, route: Route, engine: Engine, weigh: Weigh) -> None:
        self._dataset, self._route, self._weigh = dataset, route, weigh
        self._asked: deque[tuple[Window, list[NDArray[np.int64]]]] = deque()
        """Windows under way, with the places of each slice's rows in them."""
        self._encoded = engine.encoded(self._slices())
        self._buffers = Buffers(dataset.columns)

    def next(self) -> tuple[Window, Rows, dict[int, Outcome]]:
        """The next window's rows, and what turned out bad among them."""
        first = next(self._encoded, None)  # by now its window has been asked for, if there is one
        window, places = self._asked.popleft()
        into = self._buffers.take(len(window))
        into.rows[:], into.weights[:] = -1, 0
        bad: dict[int, Outcome] = {}
        for number, here in enumerate(places):
            got = first if number == 0 else next(self._encoded, None)
            if got is None:
                raise RuntimeError("the encoders gave less than they were asked for")
            into.rows[here] = got.rows
            into.weights[here] = got.weights
            into.latents[here] = _items(got.latents)
            into.text[here] = _items(got.text)
            bad |= {outcome.row: outcome for outcome in got.bad}
        into.weights[:] *= self._weigh(into.rows)
        return window, into, bad

    def give_back(self, rows: Rows) -> None:
        self._buffers.give_back(rows)

    def close(self) -> None:
        if hasattr(self._encoded, "close"):
            self._encoded.close()

    def _slices(self) -> Iterator[Slice]:
        data, epoch = self._dataset, self._route.order.epoch
        for lane, window in self._route.windows():
            needed, places, at = self._route.needed(lane, window), window.places(), 0
            slices: list[tuple[Slice, NDArray[np.int64]]] = []
            for piece in window.pieces:
                block = piece.block
                uri, group = (
                    data.storage.uri_of(data.paths[int(data.blocks.part[block])]),
                    int(data.blocks.group[block]),
                )
                for skip in range(piece.start, piece.stop, data.slice_rows):
                    count = min(data.slice_rows, piece.stop - skip)
                    here = places[at : at + count]
                    at += count
                    if needed[here].any():
                        some = Slice.of(uri, group, int(data.blocks.rows[block]), skip, epoch, needed[here])
                        slices.append((some, here))
            self._asked.append((window, [here for _, here in slices]))
            for some, _ in slices:
                yield some


def _items(values: NDArray[np.uint8]) -> NDArray[np.void]:
    """One item a row, as the buffers hold them."""
    items: NDArray[np.void] = np.ascontiguousarray(values).view(np.dtype((np.void, values.shape[1])))[:, 0]
    return items
