"""How much of its time something is in use."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Occupancy:
    """How long something was in use, and how long it stood idle between uses, from the first use on."""

    clock: Callable[[], float] = time.monotonic
    busy_s: float = 0.0
    idle_s: float = 0.0
    _inside: int = 0
    _since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "Occupancy":
        with self._lock:
            self._pass()
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._pass()
            self._inside -= 1

    def _pass(self) -> None:
        now = self.clock()
        if self._since is not None:
            if self._inside:
                self.busy_s += now - self._since
            else:
                self.idle_s += now - self._since
        self._since = now
