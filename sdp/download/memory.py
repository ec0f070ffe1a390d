"""How many bytes of images one worker holds: asked for before a body is read, given back when it is decoded."""

import threading
from collections.abc import Callable


class Buffer:
    """A bound on bytes in memory. What is reserved can always be completed, so nobody waits for ever."""

    def __init__(self, limit: int, on_release: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self.on_release = on_release
        """Called from the thread that gives back."""

    def reserve(self, size: int) -> bool:
        """Take so many bytes if they are free; one image gets through whatever its size."""
        with self._lock:
            if self._used and self._used + size > self._limit:
                return False
            self._used += size
            return True

    def grow(self, size: int) -> None:
        """Take more for an image that has turned out larger."""
        with self._lock:
            self._used += size

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
