"""The figures of a download, which workers count and the driver adds up, prints and emits as metrics."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.outcomes import Counts, Outcome
from sdp.download.fetch import Request
from sdp.telemetry.catalogue import BYTES, SECONDS


@dataclass(slots=True)
class DownloadFigures:
    """The figures of a worker or of all workers, so far."""

    written: int = 0
    filtered: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    """Bytes fetched."""
    stored_bytes: int = 0
    requests: int = 0
    workers: int = 0
    """Number of workers in all."""
    durations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SECONDS) + 1, np.int64))
    """Fetches by the bucket of their time, the last of which has no bound."""
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BYTES) + 1, np.int64))
    """Images by the bucket of their size."""

    @property
    def done(self) -> int:
        return self.written + self.filtered + self.failed

    def note(self, outcome: Outcome) -> None:
        """Count the outcome of an address."""
        setattr(self, outcome.outcome, getattr(self, outcome.outcome) + 1)
        if outcome.reason is not None:
            self.reasons[outcome.reason] += 1

    def count_parts(self, counts: Iterable[Counts]) -> None:
        """Take the outcomes from the written parts, since those of the workers include units lost with a worker."""
        total = sum(counts, Counts())
        self.written, self.filtered, self.failed = total.written, total.filtered, total.failed
        self.reasons = Counter(total.reasons)

    def note_fetch(self, request: Request[Any]) -> None:
        """Count a fetch and its result."""
        self.requests += request.attempts
        self.bytes += request.size
        self.durations[bisect_left(SECONDS, request.seconds)] += 1
        if request.failure is None:
            self.sizes[bisect_left(BYTES, request.size)] += 1

    def merge(self, other: "DownloadFigures") -> None:
        for name in ("written", "filtered", "failed", "reasons", "bytes", "stored_bytes", "requests"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.durations += other.durations
        self.sizes += other.sizes
