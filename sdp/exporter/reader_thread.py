"""A thread for readings that may hang, and callers that wait for it with a deadline.

NVML has no timeouts: a call into a driver that hangs may never return. So each reader has its own thread; a scrape
waits for it until a deadline, and not at all while an earlier reading is overdue.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[T]):
    """The result of waiting for a reading."""

    value: T | None
    """None if the reading is late, or raised an exception, which is logged."""
    late: bool = False


class ReaderThread(Generic[T]):
    """Runs `read` in its own thread, once for all concurrent callers."""

    def __init__(self, name: str, read: Callable[[], T], *, patience_s: float) -> None:
        self.name = name
        self._read = read
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked = 0
        self._begun = 0
        self._done = 0
        self._value: T | None = None
        self._busy_since: float | None = None
        self._stopped = False

    def ask(self) -> int:
        """Request a reading and return its ticket; a reading under way is shared."""
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name=f"sdp-{self.name}", daemon=True)
                self._thread.start()
            if self._begun == self._done:
                self._asked = self._begun + 1
                self._changed.notify_all()
                return self._asked
            return self._begun

    def answer(self, ticket: int, until: float) -> ReadResult[T]:
        """Wait for a reading until `until` on the monotonic clock; it is late after that, or if the thread is stuck."""
        with self._changed:
            while self._done < ticket and not self._stopped:
                overdue = until if self._busy_since is None else min(until, self._busy_since + self._patience_s)
                left = overdue - time.monotonic()
                if left <= 0:
                    return ReadResult(None, late=True)
                self._changed.wait(left)
            return ReadResult(self._value, late=self._done < ticket)

    @property
    def stuck(self) -> bool:
        """True if the thread has been busy for longer than callers wait."""
        with self._changed:
            return self._busy_since is not None and time.monotonic() - self._busy_since > self._patience_s

    def stop(self) -> None:
        """End the thread as soon as it is idle; a thread that hangs remains."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._asked > self._begun)
                if self._stopped:
                    return
                self._begun = self._asked
                self._busy_since = time.monotonic()
            value = self._read_or_log()
            with self._changed:
                self._done, self._value = self._begun, value
                self._busy_since = None
                self._changed.notify_all()

    def _read_or_log(self) -> T | None:
        try:
            return self._read()
        except Exception:
            # The thread must survive: callers wait for it, and the next reading may succeed.
            LOG.exception("%s: reading failed", self.name)
            return None
