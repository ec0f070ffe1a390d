"""The memory for one worker's images, reserved before they are read and released once they are decoded."""

import threading
from collections.abc import Callable


class Buffer:
    """A limit on bytes in memory."""

    def __init__(self, limit: int, on_release: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self.on_release = on_release
        """A function that the releasing thread calls."""

    def reserve(self, size: int, *, spare: int = 0, beyond_limit: bool = False) -> bool:
        """Reserve bytes if they are free and `spare` (at most half the limit) stay free; `beyond_limit` always does."""
        with self._lock:
            if self._used + size > self._limit - min(spare, self._limit // 2) and not beyond_limit:
                return False
            self._used += size
            return True

    def release(self, size: int) -> None:
        if not size:
            return
        with self._lock:
            self._used -= size
        self.on_release()

    @property
    def full(self) -> bool:
        return self._used >= self._limit

    @property
    def used(self) -> int:
        return self._used
