"""A job's stages: the functions that a runner calls for each piece of work, in this process or on a cluster."""

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

TRIES = 2
"""Deaths of workers after which a piece is not tried again."""


@dataclass(frozen=True, slots=True)
class PrepareStats:
    """The number of items that a preparation made, and the time it took."""

    items: int = 0
    seconds: float = 0.0
    reading_s: float = 0.0
    """Time spent waiting for the source; not part of `seconds`."""

    def __add__(self, other: "PrepareStats") -> "PrepareStats":
        return PrepareStats(self.items + other.items, self.seconds + other.seconds, self.reading_s + other.reading_s)


class Stages(Protocol):
    """The work on a piece: pickled once, and run in workers.

    A worker with a method `figures` is asked each second for its figures so far. A worker's `close`, if it has one, is
    called at the end, in the driver's process only.
    """

    def load(self) -> Any:
        """Load a worker, once a process."""

    def work(self, worker: Any, value: Any) -> Any:
        """Return a piece's rows; called from several threads if several pieces are at a worker at once."""


@runtime_checkable
class Preparing(Stages, Protocol):
    """Stages with a `prepare` that makes items ready for workers; without it, `work` gets the items themselves."""

    def prepare(self, item: Any) -> tuple[Any, PrepareStats]:
        """Make an item ready for a worker, on any CPU."""


@dataclass(slots=True)
class Occupancy:
    """The time for which something was in use; a use may begin before the one before it has ended."""

    _ended: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, began: float, ended: float) -> tuple[float, float]:
        """Return the seconds of a use that no earlier use covers, and the idle seconds before it."""
        with self._lock:
            last = began if self._ended is None else self._ended
            self._ended = max(last, ended)
        return max(0.0, ended - max(began, last)), max(0.0, began - last)
