"""The figures of a download: what a worker counts, what the driver adds up, shows and emits."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome
from sdp.telemetry.catalogue import BYTES, SECONDS

_KEPT_HOSTS = 1000


@dataclass(slots=True)
class Histogram:
    """How many values lie at or below each bound; the last count is of what lies above all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: "Histogram") -> None:
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class Host:
    """What one host was like."""

    images: int = 0
    failures: int = 0
    seconds: float = 0.0
    bytes: int = 0

    @property
    def mean_s(self) -> float:
        return self.seconds / max(1, self.images + self.failures)


@dataclass(slots=True)
class DownloadFigures:
    """What has been done so far."""

    written: int = 0
    filtered: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    """Fetched."""
    stored_bytes: int = 0
    requests: int = 0
    workers: int = 0
    """How many there were in all."""
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    sizes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    hosts: dict[str, Host] = field(default_factory=dict)

    @property
    def done(self) -> int:
        return self.written + self.filtered + self.failed

    def note(self, outcome: Outcome) -> None:
        """Count what became of an address."""
        if outcome.outcome == WRITTEN:
            self.written += 1
        elif outcome.outcome == FILTERED:
            self.filtered += 1
        elif outcome.outcome == FAILED:
            self.failed += 1
        if outcome.reason is not None:
            self.reasons[outcome.reason] += 1

    def note_fetch(self, host: str, *, size: int, seconds: float, attempts: int, came: bool) -> None:
        """Count how the fetching of an image went."""
        self.requests += attempts
        self.bytes += size
        self.seconds.add(seconds)
        if came:
            self.sizes.add(size)
        if not attempts:
            return
        known = self.hosts.get(host)
        if known is None:
            if len(self.hosts) >= 2 * _KEPT_HOSTS:
                self._forget_fast_hosts()
            known = self.hosts[host] = Host()
        known.images += came
        known.failures += not came
        known.seconds += seconds
        known.bytes += size

    def merge(self, other: "DownloadFigures") -> None:
        self.written += other.written
        self.filtered += other.filtered
        self.failed += other.failed
        self.reasons.update(other.reasons)
        self.bytes += other.bytes
        self.stored_bytes += other.stored_bytes
        self.requests += other.requests
        self.seconds.merge(other.seconds)
        self.sizes.merge(other.sizes)
        for name, host in other.hosts.items():
            known = self.hosts.setdefault(name, Host())
            known.images += host.images
            known.failures += host.failures
            known.seconds += host.seconds
            known.bytes += host.bytes
        if len(self.hosts) > 2 * _KEPT_HOSTS:
            self._forget_fast_hosts()

    def slowest(self, count: int = 10) -> list[tuple[str, Host]]:
        """The hosts that took most of the time."""
        return sorted(self.hosts.items(), key=lambda item: (-item[1].seconds, item[0]))[:count]

    def _forget_fast_hosts(self) -> None:
        self.hosts = dict(self.slowest(_KEPT_HOSTS))


def added(figures: Mapping[str, DownloadFigures]) -> DownloadFigures:
    """The sum over workers."""
    total = DownloadFigures()
    for each in figures.values():
        total.merge(each)
    return total
