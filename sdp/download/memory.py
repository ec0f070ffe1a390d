"""How many bytes of images one worker holds: taken before they are read, given back when the image is decoded."""

import threading
from collections.abc import Callable


class Buffer:
    """A bound on bytes in memory."""

    def __init__(self, limit: int, on_release: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self.on_release = on_release
        """Called from the thread that gives back."""

    def reserve(self, size: int, *, spare: int = 0, beyond_limit: bool = False) -> bool:
        """Take so many bytes if they are free and `spare` (half the limit at most) stay free, or in any case."""
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
