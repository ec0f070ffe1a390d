"""The direct reader: each worker reads its own share of the epoch's order, windows ahead of need, in threads."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sdp.datasets.ledger import address_offset
from sdp.device import thread_pool
from sdp.errors import DatasetError
from sdp.model.checkpoints import FIRST, EpochStart
from sdp.train.data.batch import Batch
from sdp.train.data.latents import Column, GroupReader, LatentsDataset
from sdp.train.data.loading import Loader
from sdp.train.data.mixture import Mixture, Span, shares_of
from sdp.train.data.order import EpochOrder, Lane, OrderShape, Take, Window
from sdp.train.data.prefetch import prefetched
from sdp.train.data.rows import Buffers, Rows, batch_of
from sdp.train.data.weights import RowWeights, Weigh
from sdp.train.randomness import seed_of_phase


@dataclass(frozen=True)
class Ingredient:
    """One of the datasets that are read."""

    dataset: LatentsDataset
    weight: float = 1.0
    """Its samples for each one of the first dataset."""
    weighing: Callable[[], Weigh] = RowWeights
    """Gives the rows' weights, asked for at the beginning of each epoch."""


@dataclass(frozen=True)
class DirectReader:
    """Batches of one worker. The position in the order is all there is to remember."""

    ingredients: tuple[Ingredient, ...]
    seed: int
    shape: OrderShape
    rank: int
    world: int
    threads: int = 4
    ahead: int = 2
    """Batches made before they are asked for."""
    verify: bool = True
    """Check what is read against its checksums."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """What batches are made for: a GPU copies them from page-locked memory without waiting."""

    def __post_init__(self) -> None:
        for other in self.ingredients[1:]:
            _refuse_another_kind(self.ingredients[0].dataset, other.dataset)

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self.mixture.rows

    def positions(self, start: EpochStart) -> int:  # noqa: ARG002 (those of several shapes depend on it)
        """Return how many positions an epoch has."""
        return self.rows

    @property
    def mixed(self) -> bool:
        """Whether there are several datasets, with addresses and epochs of their own."""
        return len(self.ingredients) > 1

    @property
    def columns(self) -> tuple[Column, Column]:
        return self.ingredients[0].dataset.columns

    @cached_property
    def mixture(self) -> Mixture:
        return mixture_of(self.ingredients)

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart = FIRST) -> Iterator[Batch]:
        """This worker's share of every batch from a position to the epoch's end, padded to equal size."""
        return prefetched(self._batches(epoch, position, batch_size, start), self.ahead, "sdp-batches", self.device)

    def after(self, epoch: int, start: EpochStart) -> EpochStart:
        """Return what the epoch after this one begins with."""
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
                    mine = self._share(passes, spans)
                    for span, takes in mine:
                        passes.lanes(span.dataset, span.epoch).want(takes)
                    filled = [
                        rows
                        for span, takes in mine
                        for take in takes
                        for rows in passes.lanes(span.dataset, span.epoch).take(take)
                    ]
                    yield batch_of(self.columns, share, filled, pin=self.device.type == "cuda")
                    for span in spans:
                        passes.consumed(span.dataset, span.epoch, span.stop)
            finally:
                passes.close()

    def _share(self, passes: "Passes", spans: list[Span]) -> list[tuple[Span, list[Take]]]:
        """Return what of some spans falls to this worker."""
        if len(self.ingredients) == 1:
            return [
                (span, list(passes.order(0, span.epoch).share(span.start, span.stop, self.rank, self.world)))
                for span in spans
            ]
        return [
            (span, list(passes.order(span.dataset, span.epoch).takes(span.start, span.stop, at, to)))
            for span, at, to in shares_of(spans, self.rank, self.world)
        ]


def mixture_of(ingredients: tuple[Ingredient, ...]) -> Mixture:
    return Mixture(tuple(some.dataset.rows for some in ingredients), tuple(some.weight for some in ingredients))


def _refuse_another_kind(first: LatentsDataset, other: LatentsDataset) -> None:
    for one, another in zip(first.columns, other.columns, strict=True):
        if (one.name, one.shape, one.dtype) != (another.name, another.shape, another.dtype):
            raise DatasetError(
                f"source.also: expected {one.name} of {one.dtype} {one.shape} as {first.files.uri_of('')} has it, got "
                f"{another.name} of {another.dtype} {another.shape} in {other.files.uri_of('')}; process both alike"
            )


class Passes:
    """The passes over the datasets that are under way, each an epoch of its dataset's own."""

    def __init__(self, reader: DirectReader, pool: ThreadPoolExecutor, begin: EpochStart) -> None:
        self._reader, self._pool = reader, pool
        self._seed = seed_of_phase(reader.seed, begin.phase)
        self._shape = replace(reader.shape, lanes=begin.lanes or reader.shape.lanes)
        self._orders: dict[tuple[int, int], EpochOrder] = {}
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self._groups = [GroupReader(some.dataset, reader.verify) for some in reader.ingredients]
        self._buffers = [Buffers(some.dataset.columns) for some in reader.ingredients]

    def order(self, dataset: int, epoch: int) -> EpochOrder:
        if (dataset, epoch) not in self._orders:
            blocks = self._reader.ingredients[dataset].dataset.blocks
            self._orders[dataset, epoch] = EpochOrder(self._reader.seed, epoch, blocks, self._shape)
        return self._orders[dataset, epoch]

    def lanes(self, dataset: int, epoch: int) -> "Lanes":
        if (dataset, epoch) not in self._lanes:
            weigh = self._reader.ingredients[dataset].weighing()
            own, offset = (epoch, address_offset(dataset)) if self._reader.mixed else (None, 0)
            loader = Loader(self._groups[dataset], weigh, self._seed, epoch, offset)
            order = self.order(dataset, epoch)
            self._lanes[dataset, epoch] = Lanes(order, loader, own, self._pool, self._buffers[dataset])
        return self._lanes[dataset, epoch]

    def consumed(self, dataset: int, epoch: int, upto: int) -> None:
        """Positions before this one are not needed any more."""
        key, order = (dataset, epoch), self.order(dataset, epoch)
        if upto < order.rows:
            if key in self._lanes:
                self._lanes[key].forget(upto // order.lanes)
            return
        del self._orders[key]
        if (lanes := self._lanes.pop(key, None)) is not None:
            lanes.close()

    def close(self) -> None:
        for lanes in self._lanes.values():
            lanes.close()


@dataclass(slots=True)
class _Loading:
    """A window that is being read or has been."""

    start: int
    stop: int
    future: Future[Rows]
    _rows: Rows | None = None

    def rows(self) -> Rows:
        """Its rows, waited for; the future's lock is passed once."""
        if self._rows is None:
            self._rows = self.future.result()
        return self._rows


class Lanes:
    """The windows of an epoch that are being read or used, lane by lane in their order."""

    def __init__(
        self, order: EpochOrder, loader: Loader, epoch: int | None, pool: ThreadPoolExecutor, buffers: Buffers
    ) -> None:
        self._order, self._loader, self._epoch, self._pool = order, loader, epoch, pool
        self._lanes: dict[int, Lane] = {}
        self._windows: dict[int, deque[_Loading]] = {}
        self._enough: dict[int, float] = {}
        """Of each lane, the row up to which nothing more has to be asked for."""
        self._buffers = buffers

    def want(self, takes: list[Take]) -> None:
        """Begin to read what these takes need, then what comes soon after them."""
        wanting = [take for take in takes if self._enough.get(take.lane, -1) < take.stop]
        for take in wanting:
            self._read(take.lane, take.start, take.stop)
        for take in wanting:
            # Half a window ahead (and at least two takes), so that a lane rarely holds two whole ones.
            last, end = self._windows[take.lane][-1], len(self._lane(take.lane))
            ahead = max((last.stop - last.start) // 2, 2 * (take.stop - take.start))
            if last.stop < take.stop + ahead:
                self._read(take.lane, last.stop, min(take.stop + ahead, end))
            upto = self._windows[take.lane][-1].stop
            self._enough[take.lane] = upto - ahead if upto < end else math.inf

    def take(self, take: Take) -> Iterator[Rows]:
        """The rows of a take, window by window."""
        for some in self._windows[take.lane]:
            start, stop = max(take.start, some.start), min(take.stop, some.stop)
            if start < stop:
                yield some.rows().slice(start - some.start, stop - some.start)

    def forget(self, row: int) -> None:
        """Let go of windows before a row: all lanes are read at one pace."""
        for lane in self._windows:
            self.forget_in(lane, row)

    def forget_in(self, lane: int, row: int) -> None:
        """The same of one lane."""
        windows = self._windows[lane]
        while windows and windows[0].stop <= row:
            done = windows.popleft()
            if done.future.done() and done.future.exception() is None:
                self._buffers.give_back(done.rows())

    def close(self) -> None:
        for windows in self._windows.values():
            for some in windows:
                some.future.cancel()
        self._windows.clear()

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = self._order.lane(number)
        return self._lanes[number]

    def _read(self, lane: int, start: int, stop: int) -> None:
        windows = self._windows.setdefault(lane, deque())
        start = max(start, windows[-1].stop) if windows else start
        while start < stop:
            window = self._lane(lane).window_at(start)
            windows.append(_Loading(window.start, window.stop, self._pool.submit(self._load, window)))
            start = window.stop

    def _load(self, window: Window) -> Rows:
        into = self._buffers.take(len(window))
        self._loader.load(window.pieces, window.places(), into)
        return replace(into, epoch=self._epoch)
