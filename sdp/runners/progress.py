"""The progress of a job on pictures: its line, its metrics and its summary."""

import time

from sdp import telemetry
from sdp.console import Progress, counted, duration
from sdp.runners.desk import State


class Tracker(Progress):
    """Counts a run's pictures, and shows and emits the progress."""

    def __init__(self, job: str, output: str, total: int, counter: str | None = None) -> None:
        """`counter` is a metric that also counts the pictures."""
        self._job, self._total, self._counter = job, total, counter
        super().__init__(job)
        self._telemetry = telemetry.begin(output)
        self._finished = self._done = 0
        self._began, self._elapsed_s = time.monotonic(), 0.0

    def show(self, state: State, finished: int) -> None:
        """Show the progress: `finished` pictures of finished work, or more by the workers' own counts.

        Those also count what dies with a worker and is done again.
        """
        self._finished, self._elapsed_s = finished, time.monotonic() - self._began
        self._done = max(self._done, finished, min(self._total, sum(state.figures.values())))
        if self._counter is not None:
            self._telemetry.reach(self._counter, self._done)
        self.update(str(self))
        self._telemetry.progress(self._job, self._done, self._total)

    def __str__(self) -> str:
        """Return the progress: 120 of 200 pictures · 1.08/s · ETA 1:14."""
        rate = self._rate(self._done)
        line = f"{self._done:,} of {counted(self._total, 'picture')} · {rate:,.3g}/s"
        return f"{line} · ETA {duration((self._total - self._done) / rate)}" if 0 < self._done < self._total else line

    @property
    def summary(self) -> str:
        """Return a summary of this run: 200 pictures in 3:05, 1.08/s."""
        made = counted(self._finished, "picture")
        return f"{made} in {duration(self._elapsed_s)}, {self._rate(self._finished):,.3g}/s"

    def _rate(self, pictures: int) -> float:
        return pictures / self._elapsed_s if self._elapsed_s else 0.0
