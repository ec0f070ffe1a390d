"""The streaming reader: somebody else reads segments of the epoch, and each worker takes what it is given of them.

Nobody knows in advance which row comes to whom. Workers take equally many all the same, to within one row: of the first
n rows of the stream worker r takes ⌊(n + r) / world⌋, and these add up to n. A segment is padded so that everybody gets
equally many of it. What is consumed is the ledger's to say (see `segments`); the position counts the stream's rows.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sdp.train.data.batch import Batch
from sdp.train.data.latents import Column
from sdp.train.data.prefetch import prefetched
from sdp.train.data.rows import Rows, batch_of


class Feed(Protocol):
    """What brings one worker its rows."""

    def segments(self, epoch: int, position: int) -> list[int]:
        """How many rows, padding included, each segment has that the epoch has left; all divide by the workers."""

    def blocks(self, epoch: int, nth: int) -> Iterator[Rows]:
        """This worker's equal share of the n-th of these segments, some rows at a time."""


@dataclass
class StreamedReader:
    """Batches of one worker."""

    feed: Feed
    columns: tuple[Column, Column]
    rank: int
    world: int
    rows: int
    """Positions in an epoch; of one under way, those behind it and those that it has left."""
    mixed: int = 4
    """Blocks that a batch is taken from."""
    ahead: int = 2
    """Batches made before they are asked for."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """What batches are made for: a GPU copies them from page-locked memory without waiting."""

    def batches(self, epoch: int, position: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share of every batch that the epoch has left, padded to equal size."""
        return prefetched(self._batches(epoch, position, batch_size), self.ahead, "sdp-batches", self.device)

    def _batches(self, epoch: int, position: int, batch_size: int) -> Iterator[Batch]:
        segments = self.feed.segments(epoch, position)
        left = sum(segments)
        self.rows = position + max(1, left)  # an epoch with nothing left ends by one empty step
        share = -(-batch_size // self.world)
        shares = [count // self.world for count in segments]
        with closing(_Stream(lambda nth: self.feed.blocks(epoch, nth), shares, self.mixed)) as stream:
            for start in range(0, max(1, left), batch_size):
                stop = min(start + batch_size, left)
                count = (stop + self.rank) // self.world - (start + self.rank) // self.world
                yield batch_of(self.columns, share, stream.take(count), pin=self.device.type == "cuda")


@dataclass
class _Open:
    """A block that rows are taken from."""

    rows: Rows
    taken: int = 0

    @property
    def left(self) -> int:
        return len(self.rows) - self.taken


@dataclass
class _Stream:
    """One worker's shares of segments, one after the other, each from several blocks at a time."""

    blocks: Callable[[int], Iterator[Rows]]
    shares: list[int]
    mixed: int
    _open: deque[_Open] = field(default_factory=deque)
    _nth: int = -1
    _left: int = 0
    """Of the segment, rows that are still to be taken."""
    _came: int = 0
    """Of the segment, rows that are open or taken."""
    _now: "_Begun | None" = None
    _next: "_Begun | None" = None

    def take(self, count: int) -> list[Rows]:
        """So many rows; those of a segment before those of the next one."""
        taken: list[Rows] = []
        while count:
            while not self._left:
                self._turn()
            some = min(count, self._left)
            count -= some
            self._left -= some
            taken += self._of_this(some)
            if self._left <= self.shares[self._nth] // 4:
                self._begin_next()
        return taken

    def close(self) -> None:
        for begun in (self._now, self._next):
            if begun is not None:
                begun.close()

    def _of_this(self, count: int) -> Iterator[Rows]:
        while count:
            while len(self._open) < self.mixed and self._came < self.shares[self._nth]:
                block = _Open(self._following())
                self._came += len(block.rows)
                self._open.append(block)
            block = self._open.popleft()
            some = min(block.left, -(-count // (len(self._open) + 1)))
            yield block.rows.slice(block.taken, block.taken + some)
            block.taken += some
            count -= some
            if block.left:
                self._open.append(block)

    def _following(self) -> Rows:
        assert self._now is not None
        block = self._now.next()
        if block is None:
            raise RuntimeError(f"segment {self._nth}: {self._came} rows came, {self.shares[self._nth]} were announced")
        return block

    def _turn(self) -> None:
        """To the next segment."""
        if self._now is not None:
            self._now.finish()
        self._begin_next()
        self._now, self._next = self._next, None
        self._nth += 1
        self._left, self._came = self.shares[self._nth], 0

    def _begin_next(self) -> None:
        following = self._nth + 1
        if self._next is None and following < len(self.shares):
            self._next = _Begun(lambda: self.blocks(following))


class _Begun:
    """A segment's blocks, the first of which a thread has begun to wait for."""

    def __init__(self, begin: Callable[[], Iterator[Rows]]) -> None:
        self._first: deque[Rows | BaseException | None] = deque()
        self._blocks: Iterator[Rows] | None = None
        # A daemon: where the others have left, what it waits for may never come.
        self._thread = threading.Thread(target=self._begin, args=(begin,), name="sdp-segment", daemon=True)
        self._thread.start()

    def next(self) -> Rows | None:
        """The next block, None after the last."""
        self._thread.join()
        if self._first:
            first = self._first.popleft()
            if isinstance(first, BaseException):
                raise first
            return first
        return next(self._blocks, None) if self._blocks is not None else None

    def finish(self) -> None:
        """Take the end, too, for whoever sends it to know."""
        if self.next() is not None:
            raise RuntimeError("a segment has more rows than were announced")

    def close(self) -> None:
        if not self._thread.is_alive() and self._blocks is not None and hasattr(self._blocks, "close"):
            self._blocks.close()

    def _begin(self, begin: Callable[[], Iterator[Rows]]) -> None:
        try:
            self._blocks = begin()
            self._first.append(next(self._blocks, None))
        except BaseException as error:  # noqa: BLE001 (raised where the block is used)
            self._first.append(error)
