"""The reader: a plan says which rows each step takes, a source loads them window by window, and they become a batch."""

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, tee
from typing import Any, Protocol, TypeVar

import torch

from sdp.device import start_thread
from sdp.families import ALL_TOKENS, TextSpace
from sdp.model.checkpoints import FIRST, EpochStart
from sdp.train.data.batch import Batch, batch_of, batch_of_shapes
from sdp.train.data.columns import RowColumns
from sdp.train.data.granules import GranulePlan
from sdp.train.data.mixture import MixturePlan
from sdp.train.data.order import LaneRange, Route, Window, windows_of
from sdp.train.data.rows import Buffers, Rows

Item = TypeVar("Item")


class RowSource(Protocol):
    """A kind of rows, and how they are loaded."""

    def columns(self, dataset: int) -> RowColumns:
        """Return the columns of a dataset's rows."""

    def loaded(self, windows: Iterator[Window], route: Route, buffers: Buffers) -> Generator[tuple[Window, Rows]]:
        """Yield the windows with their rows, in order, and begin a bounded number ahead."""


@dataclass(frozen=True)
class Reader:
    """Reads the batches of one worker. The position in the order is its only state."""

    plan: MixturePlan | GranulePlan
    source: RowSource
    rank: int = 0
    world: int = 1
    ahead: int = 4
    """Batches prepared ahead of need, in a thread; 0 makes each when it is needed."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """The device that batches are for: a GPU copies them from pinned memory without waiting."""
    space: TextSpace = ALL_TOKENS
    """The model's captions, whose padding a batch may cut."""

    @property
    def forms(self) -> list[RowColumns]:
        """The columns of each form that a micro-batch may have: a shape of latents, and a number of tokens."""
        shapes = [self.source.columns(number) for number in range(self.plan.shapes)]
        return [
            (latents, replace(text, shape=(tokens, *text.shape[1:])))
            for latents, text in shapes
            for tokens in self.space.lengths(text.shape[0])
        ]

    def blank(self, form: RowColumns, batch_size: int) -> Batch:
        """Return padding in place of this worker's share of a batch, or of a micro-batch if each has a shape."""
        if self.plan.granule is not None:
            return batch_of_shapes([(form, [])], self.plan.granule)
        return batch_of(form, Route(0, batch_size, self.rank, self.world).share, [])

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart = FIRST) -> Generator[Batch]:
        """Return this worker's share of every batch from a position to the epoch's end, padded to equal size."""
        batches = self._batches(epoch, start, Route(position, batch_size, self.rank, self.world))
        return prefetched(batches, self.ahead, self.device) if self.ahead else batches

    def _batches(self, epoch: int, start: EpochStart, route: Route) -> Generator[Batch]:
        """Yield the batch of each step; load a lane's windows up to the step, and give back those behind it."""
        steps, ahead = tee(self.plan.steps(epoch, start, route))
        buffers = Buffers()
        held: defaultdict[tuple[int, int], deque[tuple[Window, Rows]]] = defaultdict(deque)
        """The windows in use, by dataset and lane."""
        with closing(self.source.loaded(windows_of(ahead), route, buffers)) as loaded:
            for step in steps:
                filled = []
                for take in step:
                    windows = held[take.lane.key]
                    while not windows or windows[-1][0].lane is not take.lane or windows[-1][0].stop < take.stop:
                        windows.append(next(loaded))
                    filled.append([rows[take.within(window)] for window, rows in windows if window.lane is take.lane])
                batch = self._batch(step, filled, route)
                for key, last in {take.lane.key: take for take in step}.items():
                    windows = held[key]
                    while windows and (windows[0][0].lane is not last.lane or windows[0][0].stop <= last.stop):
                        buffers.give_back(windows.popleft()[1], self.source.columns(key[0]))
                yield batch

    def _batch(self, step: list[LaneRange], filled: list[list[Rows]], route: Route) -> Batch:
        """Return the batch of a step, given the rows of each of its ranges."""
        size = self.plan.granule
        how: dict[str, Any] = {"space": self.space, "pin": self.device.type == "cuda"}
        if size is None:
            return batch_of(self.source.columns(0), route.share, [*chain.from_iterable(filled)], **how)
        parts = [(self.source.columns(take.lane.key[0]), rows) for take, rows in zip(step, filled, strict=True)]
        empty = -(-(route.batch_size // size) // route.world) - len(parts)
        return batch_of_shapes([*parts, *[(self.source.columns(0), [])] * empty], size, **how)


def in_flight(begun: Iterable[Callable[[], Item]], ahead: int) -> Generator[Item]:
    """Yield the results of calls that an iterable begins; up to `ahead` more are begun before one is waited for."""
    waiting: deque[Callable[[], Item]] = deque()
    for result in begun:
        waiting.append(result)
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def prefetched(items: Generator[Item], ahead: int, device: torch.device) -> Generator[Item]:
    """Yield the items of a generator that a thread on `device` runs up to `ahead` items ahead.

    An error is raised in place of the item that it prevented. Closing this generator closes `items`, in its thread.
    """
    ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    room, closed = threading.Semaphore(ahead), threading.Event()

    def work() -> None:
        end: BaseException = StopIteration()
        try:
            with closing(items):
                for item in items:
                    ready.put((item, None))
                    room.acquire()
                    if closed.is_set():
                        break
        except BaseException as error:  # noqa: BLE001 (raised again by the consumer)
            end = error
        ready.put((None, end))

    thread = start_thread(device, work, "sdp-batches")
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
            room.release()
    finally:
        closed.set()
        room.release()
        thread.join(timeout=60)
