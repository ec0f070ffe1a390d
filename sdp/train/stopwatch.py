"""The time of a step by activity."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import record_function

from sdp.device import record

ANNOTATION = "sdp."
"""The prefix of activities' names in a profile."""


class Stopwatch:
    """Measures seconds by activity; on a GPU its own time, by events, without waiting for it.

    >>> with stopwatch.measure("forward"):
    ...     ...
    >>> stopwatch.lap()  # {"forward": 0.21}
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._measured = 0.0
        """Seconds of the host in blocks so far, from which a block around them subtracts."""
        self.named = False
        """True while the job is profiled, and activities are named in the profile."""

    @contextmanager
    def measure(self, activity: str, *, host: bool = False) -> Iterator[None]:
        """Add the time of the block, less that of blocks in it, to an activity.

        `host` measures the CPU's time, such as waiting for data.
        """
        cuda = self._device.type == "cuda"
        start, before = time.perf_counter(), self._measured
        with record_function(ANNOTATION + activity) if self.named else nullcontext():
            if cuda and not host:
                stream = torch.cuda.current_stream(self._device)
                began = record(stream, timing=True)
                yield
                self._events.append((activity, began, record(stream, timing=True)))
            else:
                yield
        elapsed = time.perf_counter() - start
        if host or not cuda:
            self._add(activity, elapsed - (self._measured - before))
        self._measured = before + elapsed

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap; work that the GPU has not finished counts in the next lap."""
        pending = []
        for activity, began, ended in self._events:
            if ended.query():  # type: ignore[no-untyped-call]
                self._add(activity, began.elapsed_time(ended) / 1000)
            else:
                pending.append((activity, began, ended))
        self._events = pending
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, activity: str, seconds: float) -> None:
        self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds
