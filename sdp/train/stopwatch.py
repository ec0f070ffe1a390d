"""The time of a step by activity."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from sdp.device import record

ANNOTATION = "sdp."
"""The prefix of activities' names in a profile."""


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """One activity of a step that is profiled."""

    activity: str
    seconds: Callable[[], float]
    """Returns its time; on a GPU once the device is synchronised."""
    peak_bytes: int
    """The most memory that was allocated on the GPU; 0 on a CPU."""


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
        self.spans: list[MeasuredSpan] | None = None
        """The activities while the job is profiled, when they are also named in the profile; else None."""

    @contextmanager
    def measure(self, activity: str, *, host: bool = False) -> Iterator[None]:
        """Add the time of the block to an activity; `host` measures the CPU's time, such as waiting for data."""
        spans, cuda = self.spans, self._device.type == "cuda"
        if spans is not None and cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        with record_function(ANNOTATION + activity) if spans is not None else nullcontext():
            if cuda and not host:
                stream = torch.cuda.current_stream(self._device)
                began = record(stream, timing=True)
                yield
                ended = record(stream, timing=True)
                self._events.append((activity, began, ended))

                def seconds() -> float:
                    return float(began.elapsed_time(ended)) / 1000
            else:
                start = time.perf_counter()
                yield
                taken = time.perf_counter() - start
                self._add(activity, taken)

                def seconds() -> float:
                    return taken

        if spans is not None:
            peak = torch.cuda.max_memory_allocated(self._device) if cuda else 0
            spans.append(MeasuredSpan(activity, seconds, peak))

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
