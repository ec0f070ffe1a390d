"""Latents as a source of rows: threads read the row groups of the windows that the reader needs next."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from sdp.datasets.ledger import address_offset
from sdp.device import thread_pool
from sdp.train.data.columns import RowColumns
from sdp.train.data.latents import GroupReader, WeightedDataset
from sdp.train.data.order import Route, Window
from sdp.train.data.reader import in_flight
from sdp.train.data.rows import Buffers, Rows
from sdp.train.data.weights import Weigh


@dataclass(frozen=True)
class StoredRows:
    """The rows of latents datasets."""

    datasets: tuple[WeightedDataset, ...]
    threads: int = 4
    """Windows read at once, ahead of need."""
    mixed: bool = False
    """True if each dataset has addresses and epochs of its own."""

    def columns(self, dataset: int) -> RowColumns:
        """Return the columns of a dataset's rows."""
        return self.datasets[dataset].dataset.columns

    def loaded(self, windows: Iterator[Window], _: Route, buffers: Buffers) -> Generator[tuple[Window, Rows]]:
        """Yield the windows with their rows, in order."""
        readers = [GroupReader(source.dataset) for source in self.datasets]
        weighers = cache(lambda number: self.datasets[number].load_weights())

        def begin(window: Window) -> Callable[[], tuple[Window, Rows]]:
            number = window.lane.order.dataset
            into = buffers.take(len(window), self.columns(number))
            return pool.submit(self._load, window, readers[number], weighers(number), into).result

        with thread_pool(torch.device("cpu"), self.threads, "sdp-read") as pool:
            try:
                yield from in_flight(map(begin, windows), self.threads)
            finally:
                pool.shutdown(cancel_futures=True)

    def _load(self, window: Window, reader: GroupReader, weigh: Weigh, into: Rows) -> tuple[Window, Rows]:
        reader.read(window.ranges, into, window.places())
        into.weights[:] = weigh(into.rows)
        if self.mixed:
            into.rows[:] += address_offset(window.lane.order.dataset)
            into = replace(into, epoch=window.lane.order.epoch)
        return window, into
