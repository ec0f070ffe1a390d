"""Readings that may hang, each in a thread, and callers that wait for them with a deadline.

NVML has no timeouts: a call into a driver that hangs may never return. So each reader has a thread; a scrape waits for
it until a deadline, and not at all while an earlier reading is overdue.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, Literal, TypeVar

from sdp.exporter.nvml import Calls

T = TypeVar("T")
LOG = logging.getLogger(__name__)


class ReaderThread(Generic[T]):
    """Runs `read` in a thread, once for all concurrent callers, and never twice at a time."""

    def __init__(self, name: str, read: Callable[[], T], *, patience_s: float, calls: Calls) -> None:
        self.name, self._read, self._patience_s = name, read, patience_s
        self.calls = calls
        """The NVML calls that a reading makes."""
        self._lock = threading.Lock()
        self._reading: Future[T] | None = None
        self._began_at = 0.0

    def ask(self) -> "Future[T]":
        """Return the reading under way, or else begin one."""
        with self._lock:
            if self._reading is None or self._reading.done():
                self._reading, self._began_at = Future(), time.monotonic()
                name = f"sdp-{self.name}"
                threading.Thread(target=self._run, args=(self._reading,), name=name, daemon=True).start()
            return self._reading

    def answer(self, reading: "Future[T]", until: float) -> tuple[T | None, Literal["", "timeout", "exception"]]:
        """Wait for a reading until `until` on the monotonic clock, or until it has taken too long in all.

        Return its value, or None and the reason; an exception is logged.
        """
        overdue = min(until, self._began_at + self._patience_s)
        wait([reading], max(0.0, overdue - time.monotonic()))
        if not reading.done():
            return None, "timeout"
        return (None, "exception") if reading.exception() else (reading.result(), "")

    def _run(self, reading: "Future[T]") -> None:
        try:
            reading.set_result(self._read())
        except Exception as error:
            LOG.exception("%s: reading failed", self.name)
            reading.set_exception(error)
