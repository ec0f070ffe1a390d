"""The figures of a download, which workers count and the driver adds up, prints and emits as metrics."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sdp.datasets.outcomes import Counts, Outcome
from sdp.telemetry.catalogue import BYTES, SECONDS

_KEPT_HOSTS = 1000


@dataclass(slots=True)
class Histogram:
    """The number of values up to each bound, and in the last count, of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: "Histogram") -> None:
        self.counts = [count + more for count, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class Host:
    """The figures of one host."""

    images: int = 0
    failures: int = 0
    seconds: float = 0.0
    bytes: int = 0

    @property
    def mean_s(self) -> float:
        return self.seconds / max(1, self.images + self.failures)

    def merge(self, other: "Host") -> None:
        _add(self, other, "images", "failures", "seconds", "bytes")


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
    replaced: int = 0
    """Workers that died and were replaced."""
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    sizes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    hosts: dict[str, Host] = field(default_factory=dict)

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

    def note_fetch(self, host: str, *, size: int, seconds: float, attempts: int, fetched: bool) -> None:
        """Count a fetch and its result."""
        self.requests += attempts
        self.bytes += size
        self.seconds.add(seconds)
        if fetched:
            self.sizes.add(size)
        if attempts:
            self.merge_hosts({host: Host(int(fetched), int(not fetched), seconds, size)})

    def merge(self, other: "DownloadFigures") -> None:
        _add(self, other, "written", "filtered", "failed", "bytes", "stored_bytes", "requests")
        self.reasons.update(other.reasons)
        self.seconds.merge(other.seconds)
        self.sizes.merge(other.sizes)
        self.merge_hosts(other.hosts)

    def merge_hosts(self, hosts: Mapping[str, Host]) -> None:
        for name, host in hosts.items():
            self.hosts.setdefault(name, Host()).merge(host)
        if len(self.hosts) > 2 * _KEPT_HOSTS:
            self.hosts = dict(self.slowest(_KEPT_HOSTS))

    def slowest(self, count: int = 10) -> list[tuple[str, Host]]:
        """Return the hosts that took most time."""
        return sorted(self.hosts.items(), key=lambda item: (-item[1].seconds, item[0]))[:count]


def _add(figures: object, others: object, *names: str) -> None:
    """Add the figures of these names."""
    for name in names:
        setattr(figures, name, getattr(figures, name) + getattr(others, name))
