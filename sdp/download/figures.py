"""The figures of a download, which workers count and the driver adds up, prints and emits as metrics."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from sdp.datasets.outcomes import FAILED, FILTER_REASONS, FILTERED, WRITTEN, Counts, rule_of
from sdp.download.fetch import Request


@dataclass(slots=True)
class DownloadFigures:
    """The figures of a worker or of all workers, so far."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Addresses by outcome and reason, which is empty for written ones."""
    bytes: int = 0
    """Bytes fetched."""
    stored_bytes: int = 0
    requests: int = 0
    workers: int = 0
    """Number of workers in all."""
    fetch_s: float = 0.0
    """Seconds of all fetches, from the first request to the last byte."""

    @property
    def done(self) -> int:
        return self.outcomes.total()

    def of(self, outcome: str) -> int:
        """Return the number of addresses with an outcome."""
        return sum(count for (name, _), count in self.outcomes.items() if name == outcome)

    def count_parts(self, counts: Iterable[Counts]) -> None:
        """Replace the outcomes by those of the written parts: the workers' include units lost with a worker."""
        total = sum(counts, Counts())
        self.outcomes = Counter({(WRITTEN, ""): total.written})
        for reason, count in total.reasons.items():
            self.outcomes[FILTERED if rule_of(reason) in FILTER_REASONS else FAILED, reason] = count

    def note_fetch(self, request: Request[Any]) -> None:
        """Count a fetch and its result."""
        self.requests += request.attempts
        self.bytes += request.size
        self.fetch_s += request.seconds

    def __add__(self, other: "DownloadFigures") -> "DownloadFigures":
        names = [each.name for each in fields(self)]
        return DownloadFigures(**{name: getattr(self, name) + getattr(other, name) for name in names})
