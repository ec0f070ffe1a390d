"""Which piece of work is where: what to start next, and what to do when something dies. Knows nothing of Ray.

Pieces of a unit are transformed, encoded and gathered in any order; a unit whose pieces are all there is written.
A piece whose worker died is tried again; when it has killed twice it is cut into smaller ones, until the row that kills
is alone: that one is given up, and the rest of its unit is not held up by it.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sdp.datasets.units import Work
from sdp.encode.reading import Piece

Chunk = TypeVar("Chunk")
Rows = TypeVar("Rows")

TRIES = 2
"""Deaths of a piece after which it is cut, or given up if it is a single row."""
_FEW = 32
"""Rows that are tried one by one rather than cut again."""


@dataclass(slots=True)
class _Unit(Generic[Rows]):
    work: Work
    outstanding: int
    gathered: list[tuple[Piece, Rows]] = field(default_factory=list)


@dataclass(slots=True)
class Room:
    """How much may be under way at once; may be changed at any time."""

    transforms: int
    """Transforms at once."""
    ready: int
    """Transformed pieces that wait for an encoder."""
    chunks: int
    """Pieces between the begin of their transform and the end of their encoding: what memory has room for."""
    writes: int = 4


class Flow(Generic[Chunk, Rows]):
    """The state of a run. Each `start_…` hands out work, or None if there is none now; the others say what ended."""

    def __init__(self, planned: Iterator[tuple[Work, list[Piece]]], room: Room) -> None:
        self.room = room
        self._planned = planned
        self._exhausted = False
        self._units: dict[Work, _Unit[Rows]] = {}
        self._queue: deque[Piece] = deque()
        self._ready: deque[tuple[Piece, Chunk]] = deque()
        self._complete: deque[Work] = deque()
        self._transforming = self._encoding = self._writing = 0
        self._deaths: dict[Piece, int] = {}

    @property
    def finished(self) -> bool:
        """Everything is written."""
        return self._exhausted and not self._units

    @property
    def waiting(self) -> int:
        """Transformed pieces that no encoder has taken yet."""
        return len(self._ready)

    @property
    def transforming(self) -> int:
        return self._transforming

    @property
    def encoding(self) -> int:
        return self._encoding

    def start_transform(self) -> Piece | None:
        if self._transforming >= self.room.transforms or len(self._ready) >= self.room.ready:
            return None
        if self._transforming + len(self._ready) + self._encoding >= self.room.chunks:
            return None
        if not self._queue and not self._plan_more():
            return None
        self._transforming += 1
        return self._queue.popleft()

    def transformed(self, piece: Piece, chunk: Chunk) -> None:
        self._transforming -= 1
        self._ready.append((piece, chunk))

    def start_encode(self) -> tuple[Piece, Chunk] | None:
        if not self._ready:
            return None
        self._encoding += 1
        return self._ready.popleft()

    def encoded(self, piece: Piece, rows: Rows) -> None:
        self._encoding -= 1
        self._gather(piece, rows)

    def not_encoded(self, piece: Piece, chunk: Chunk) -> None:
        """The encoder was taken away, through no fault of the piece: it goes first to the next one."""
        self._encoding -= 1
        self._ready.appendleft((piece, chunk))

    def start_write(self) -> tuple[Work, list[Rows]] | None:
        if not self._complete or self._writing >= self.room.writes:
            return None
        self._writing += 1
        work = self._complete.popleft()
        gathered = self._units[work].gathered
        # In the order of the source: a piece that was cut, or came late, is put where it belongs.
        gathered.sort(key=lambda found: (found[0].order, found[0].skip))
        return work, [rows for _, rows in gathered]

    def written(self, work: Work) -> None:
        self._writing -= 1
        del self._units[work]

    def not_written(self, work: Work) -> None:
        """Its rows are still there: it is written again."""
        self._writing -= 1
        self._complete.appendleft(work)

    def transform_died(self, piece: Piece) -> Piece | None:
        """Returns the piece if it is to be given up: `given_up` is then to be called with its outcome."""
        self._transforming -= 1
        return self._died(piece)

    def encode_died(self, piece: Piece) -> Piece | None:
        """As above; the piece begins from its transform again, since its pixels may have died with it."""
        self._encoding -= 1
        return self._died(piece)

    def not_transformed(self, piece: Piece) -> None:
        """Its source did not answer, through no fault of the piece."""
        self._transforming -= 1
        self._queue.appendleft(piece)

    def lost(self, piece: Piece) -> None:
        """What had been made of a piece that was ready has vanished with its node: it begins again."""
        self._encoding -= 1
        self._queue.appendleft(piece)

    def given_up(self, piece: Piece, rows: Rows) -> None:
        self._gather(piece, rows)

    def rows_lost(self, work: Work) -> None:
        """Encoded rows vanished with their node before they were written: the unit begins again."""
        self._writing -= 1
        unit = self._units[work]
        again = [piece for piece, _ in unit.gathered]
        if not again:
            self._complete.appendleft(work)
        unit.gathered.clear()
        unit.outstanding = len(again)
        self._queue.extendleft(reversed(again))

    def _died(self, piece: Piece) -> Piece | None:
        deaths = self._deaths[piece] = self._deaths.get(piece, 0) + 1
        if deaths < TRIES:
            self._queue.appendleft(piece)
            return None
        if piece.take == 1:
            return piece
        # In roots rather than halves: each level costs two more workers.
        parts = piece.cut(piece.take if piece.take <= _FEW else math.isqrt(piece.take))
        self._units[piece.work].outstanding += len(parts) - 1
        self._queue.extendleft(reversed(parts))
        return None

    def _gather(self, piece: Piece, rows: Rows) -> None:
        unit = self._units[piece.work]
        unit.gathered.append((piece, rows))
        unit.outstanding -= 1
        if not unit.outstanding:
            self._complete.append(piece.work)

    def _plan_more(self) -> bool:
        """Bring in the next unit; False if there is none, or if those that are there have not been written off yet."""
        while not self._queue:
            if self._exhausted or len(self._complete) + self._writing > self.room.writes:
                return False
            try:
                work, pieces = next(self._planned)
            except StopIteration:
                self._exhausted = True
                return False
            self._units[work] = _Unit(work, len(pieces))
            self._queue.extend(pieces)
            if not pieces:  # nothing to do, but its part says so
                self._complete.append(work)
        return True


@dataclass(slots=True)
class Tuner:
    """How many transforms at once keep the encoders busy, from what both have taken so far."""

    most: int | None
    """The most to use; None for as many as it takes: those that find no CPU free ask an autoscaler for more."""
    first: int
    """With how many to begin."""
    _transform_s: float = 0.0
    _encode_s: float = 0.0

    def transformed(self, seconds: float) -> None:
        """How long one piece's transform took, reading included."""
        self._transform_s = _smooth(self._transform_s, seconds)

    def encoded(self, seconds: float) -> None:
        """How long an encoder was busy with one piece."""
        self._encode_s = _smooth(self._encode_s, seconds)

    def transforms(self, encoders: int, starved: bool) -> int:
        """A quarter more than the encoders' pace needs; all there are while they starve."""
        if not self._transform_s or not self._encode_s:
            return self._bounded(self.first)
        needed = math.ceil(1.25 * max(encoders, 1) * self._transform_s / self._encode_s) + 1
        return self._bounded(needed * 2 if starved else needed)

    def _bounded(self, count: int) -> int:
        return count if self.most is None else min(self.most, count)


def _smooth(mean: float, value: float) -> float:
    return value if not mean else 0.9 * mean + 0.1 * value
