"""The direct reader: each worker reads its own share of the epoch's order, in threads that work ahead of need."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sdp.datasets.ledger import address_offset
from sdp.device import thread_pool
from sdp.model.checkpoints import FIRST, EpochStart
from sdp.train.data.batch import Batch, Reader
from sdp.train.data.columns import Column
from sdp.train.data.latents import GroupReader
from sdp.train.data.mixture import Mixture, MixtureSpan, WeightedDataset, mixture_of, shares_of
from sdp.train.data.order import EpochOrder, Lane, LaneRange, Shuffle, Window
from sdp.train.data.prefetch import prefetched
from sdp.train.data.rows import Buffers, Loader, Rows, batch_of


@dataclass(frozen=True)
class DirectReader(Reader):
    """Reads the batches of one worker. The position in the order is its only state."""

    datasets: tuple[WeightedDataset, ...]
    seed: int
    shape: Shuffle
    rank: int
    world: int
    threads: int = 4
    ahead: int = 4
    """Batches prepared ahead of need."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """The device that batches are for: a GPU copies them from pinned memory without waiting."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self.mixture.rows

    @property
    def mixed(self) -> bool:
        """True if there are several datasets, each with its own addresses and epochs."""
        return len(self.datasets) > 1

    @property
    def columns(self) -> tuple[Column, Column]:
        return self.datasets[0].dataset.columns

    @cached_property
    def mixture(self) -> Mixture:
        return mixture_of(self.datasets)

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart = FIRST) -> Iterator[Batch]:
        """Return this worker's share of every batch from a position to the epoch's end, padded to equal size."""
        return prefetched(self._batches(epoch, position, batch_size, start), self.ahead, self.device)

    def after(self, epoch: int, start: EpochStart) -> EpochStart:
        """Return the start of the next epoch."""
        if not self.mixed:
            return start
        return replace(start, places=self.mixture.after(epoch, start.places))

    def _batches(self, epoch: int, position: int, batch_size: int, begin: EpochStart) -> Iterator[Batch]:
        share = -(-batch_size // self.world)
        with thread_pool(self.device, self.threads, "sdp-read") as pool:
            passes = Passes(self, pool, begin)
            try:
                for start in range(position, self.rows, batch_size):
                    spans = self.mixture.spans(epoch, start, start + batch_size, begin.places)
                    shares = self._share(passes, spans)
                    for span, lane_ranges in shares:
                        passes.lanes(span.dataset, span.epoch).request(lane_ranges)
                    filled = [
                        rows
                        for span, lane_ranges in shares
                        for lane_range in lane_ranges
                        for rows in passes.lanes(span.dataset, span.epoch).rows(lane_range)
                    ]
                    yield batch_of(self.columns, share, filled, pin=self.device.type == "cuda")
                    for span in spans:
                        passes.release(span.dataset, span.epoch, span.stop)
            finally:
                passes.close()

    def _share(self, passes: "Passes", spans: list[MixtureSpan]) -> list[tuple[MixtureSpan, list[LaneRange]]]:
        """Return this worker's share of some spans."""
        if not self.mixed:
            return [
                (span, list(passes.order(0, span.epoch).share(span.start, span.stop, self.rank, self.world)))
                for span in spans
            ]
        return [
            (span, list(passes.order(span.dataset, span.epoch).lane_ranges(span.start, span.stop, at, to)))
            for span, at, to in shares_of(spans, self.rank, self.world)
        ]


class Passes:
    """The passes over the datasets that are in progress; each is an epoch of its dataset."""

    def __init__(self, reader: DirectReader, pool: ThreadPoolExecutor, begin: EpochStart) -> None:
        self._reader, self._pool = reader, pool
        self._shape = replace(reader.shape, lanes=begin.lanes or reader.shape.lanes)
        self._orders: dict[tuple[int, int], EpochOrder] = {}
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self._groups = [GroupReader(source.dataset) for source in reader.datasets]
        self._buffers = [Buffers(source.dataset.columns) for source in reader.datasets]

    def order(self, dataset: int, epoch: int) -> EpochOrder:
        if (dataset, epoch) not in self._orders:
            row_groups = self._reader.datasets[dataset].dataset.row_groups
            self._orders[dataset, epoch] = EpochOrder(self._reader.seed, epoch, row_groups, self._shape)
        return self._orders[dataset, epoch]

    def lanes(self, dataset: int, epoch: int) -> "Lanes":
        if (dataset, epoch) not in self._lanes:
            weigh = self._reader.datasets[dataset].load_weights()
            own, offset = (epoch, address_offset(dataset)) if self._reader.mixed else (None, 0)
            loader = Loader(self._groups[dataset], weigh, offset)
            order = self.order(dataset, epoch)
            self._lanes[dataset, epoch] = Lanes(order, loader, own, self._pool, self._buffers[dataset])
        return self._lanes[dataset, epoch]

    def release(self, dataset: int, epoch: int, position: int) -> None:
        """Release the windows before a position of a pass, and the pass at its end."""
        key, order = (dataset, epoch), self.order(dataset, epoch)
        if position < order.rows:
            if key in self._lanes:
                self._lanes[key].release(position // order.lanes)
            return
        del self._orders[key]
        if (lanes := self._lanes.pop(key, None)) is not None:
            lanes.close()

    def close(self) -> None:
        for lanes in self._lanes.values():
            lanes.close()


class Lanes:
    """The windows of an epoch that are being read or used, in order, by lane."""

    def __init__(
        self, order: EpochOrder, loader: Loader, epoch: int | None, pool: ThreadPoolExecutor, buffers: Buffers
    ) -> None:
        self._order, self._loader, self._epoch, self._pool = order, loader, epoch, pool
        self._lanes: dict[int, Lane] = {}
        self._windows: dict[int, deque[tuple[Window, Future[Rows]]]] = {}
        self._sufficient: dict[int, float] = {}
        """For each lane, the row up to which requests need no further reading."""
        self._buffers = buffers

    def request(self, lane_ranges: list[LaneRange]) -> None:
        """Begin to read some ranges, then the rows soon after them."""
        short = [
            lane_range for lane_range in lane_ranges if self._sufficient.get(lane_range.lane, -1) < lane_range.stop
        ]
        for lane_range in short:
            self._read(lane_range.lane, lane_range.start, lane_range.stop)
        for lane_range in short:
            # Half a window ahead (and at least two ranges), so that a lane rarely holds two whole windows.
            last, end = self._windows[lane_range.lane][-1][0], len(self._lane(lane_range.lane))
            ahead = max((last.stop - last.start) // 2, 2 * (lane_range.stop - lane_range.start))
            if last.stop < lane_range.stop + ahead:
                self._read(lane_range.lane, last.stop, min(lane_range.stop + ahead, end))
            upto = self._windows[lane_range.lane][-1][0].stop
            self._sufficient[lane_range.lane] = upto - ahead if upto < end else math.inf

    def rows(self, lane_range: LaneRange) -> Iterator[Rows]:
        """Yield the rows of a requested range, window by window."""
        for window, rows in self._windows[lane_range.lane]:
            start, stop = max(lane_range.start, window.start), min(lane_range.stop, window.stop)
            if start < stop:
                yield rows.result().slice(start - window.start, stop - window.start)

    def release(self, row: int) -> None:
        """Release the windows before a row in every lane; all lanes are read at one pace."""
        for lane in self._windows:
            self.release_in(lane, row)

    def release_in(self, lane: int, row: int) -> None:
        """Release the windows before a row in one lane."""
        windows = self._windows[lane]
        while windows and windows[0][0].stop <= row:
            _, rows = windows.popleft()
            if rows.done() and rows.exception() is None:
                self._buffers.give_back(rows.result())

    def close(self) -> None:
        for windows in self._windows.values():
            for _, rows in windows:
                rows.cancel()
        self._windows.clear()

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = self._order.lane(number)
        return self._lanes[number]

    def _read(self, lane: int, start: int, stop: int) -> None:
        windows = self._windows.setdefault(lane, deque())
        start = max(start, windows[-1][0].stop) if windows else start
        while start < stop:
            window = self._lane(lane).window_at(start)
            windows.append((window, self._pool.submit(self._load, window)))
            start = window.stop

    def _load(self, window: Window) -> Rows:
        into = self._buffers.take(len(window))
        self._loader.load(window.ranges, window.places(), into)
        return replace(into, epoch=self._epoch)
