"""Waiting for a condition with a deadline, here or in a thread."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, deadline_s: float = 120.0, every_s: float = 0.02) -> T:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + deadline_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(every_s)
    return answer


class Waiter(threading.Thread):
    """A thread whose error is raised by `join`."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 (raised by join)
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error


def as_soon_as(condition: Callable[[], T], then: Callable[[T], object], deadline_s: float = 240.0) -> Waiter:
    """Wait in a thread for a condition, and do something with its answer; return the thread, to be joined."""
    waiter = Waiter(lambda: then(until(condition, f"what {then.__qualname__} waits for", deadline_s)))
    waiter.start()
    return waiter
