"""Counts of what the image server saw, by which a test judges how polite a client is."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

KEPT_VISITS = 100_000
"""The latest visits are kept one by one; older ones live on in the counters only."""


@dataclass(slots=True)
class Visit:
    """One request. Times are seconds of the machine's monotonic clock."""

    generation: int
    """The number of resets before it."""
    host: str
    attempt: int
    """1 for the first request of this target at this host."""
    began: float
    ended: float | None = None
    """Time when the last byte went to the kernel, or the connection ended."""
    status: int | None = None


@dataclass(slots=True)
class HostStats:
    """The statistics of one virtual host."""

    requests: int = 0
    in_flight: int = 0
    max_concurrent: int = 0
    """The most requests that were unanswered at once."""
    max_per_second: int = 0
    """The most requests that began within any one second."""


@dataclass(slots=True)
class Stats:
    """The statistics of the whole server since it started or was reset."""

    requests: int = 0
    in_flight: int = 0
    max_concurrent: int = 0
    connections: int = 0
    """Number of connections ever opened."""
    statuses: Counter[int] = field(default_factory=Counter)
    user_agents: Counter[str] = field(default_factory=Counter)
    hosts: dict[str, HostStats] = field(default_factory=dict)
    """By the Host header without its port."""


class Traffic:
    """Counts visits; written by the server's thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        """The lock for everything, which also notifies those in `wait_for` of changes."""
        self._generation = 0
        self._stats = Stats()
        self._clear()

    def _clear(self) -> None:
        self._generation += 1
        going_on = {name: host.in_flight for name, host in self._stats.hosts.items() if host.in_flight}
        total = sum(going_on.values())
        hosts = {name: HostStats(in_flight=count, max_concurrent=count) for name, count in going_on.items()}
        self._stats = Stats(in_flight=total, max_concurrent=total, hosts=hosts)
        self._attempts: Counter[tuple[str, str]] = Counter()
        self._recent: dict[str, deque[float]] = {}
        self._visits: deque[Visit] = deque(maxlen=KEPT_VISITS)

    def reset(self) -> None:
        """Forget everything but what is going on now."""
        with self._lock:
            self._clear()

    def opened(self) -> None:
        with self._lock:
            self._stats.connections += 1

    def begin(self, host: str, target: str, user_agent: str) -> Visit:
        """A request has come in whole."""
        now = time.monotonic()
        with self._lock:
            stats = self._stats
            known = stats.hosts.setdefault(host, HostStats())
            for counts in (stats, known):
                counts.requests += 1
                counts.in_flight += 1
                counts.max_concurrent = max(counts.max_concurrent, counts.in_flight)
            recent = self._recent.setdefault(host, deque())
            recent.append(now)
            while recent[0] <= now - 1:
                recent.popleft()
            known.max_per_second = max(known.max_per_second, len(recent))
            stats.user_agents[user_agent] += 1
            self._attempts[host, target] += 1
            visit = Visit(self._generation, host, self._attempts[host, target], now)
            self._visits.append(visit)
            self._lock.notify_all()
            return visit

    def end(self, visit: Visit) -> None:
        with self._lock:
            visit.ended = time.monotonic()
            self._stats.in_flight -= 1
            self._stats.hosts[visit.host].in_flight -= 1
            if visit.generation == self._generation and visit.status is not None:
                self._stats.statuses[visit.status] += 1
            self._lock.notify_all()

    def in_flight(self, host: str) -> int:
        with self._lock:
            return self._stats.hosts[host].in_flight if host in self._stats.hosts else 0

    def visits(self) -> list[Visit]:
        """The latest requests in the order in which they began."""
        with self._lock:
            return [replace(visit) for visit in self._visits]

    def wait_for(self, condition: Callable[[Stats], bool], deadline_s: float) -> None:
        """Wait until what was seen satisfies a condition."""
        with self._lock:
            if not self._lock.wait_for(lambda: condition(self._stats), deadline_s):
                raise TimeoutError(f"the image server waited {deadline_s:g} s in vain; it saw {self._stats}")

    def stats(self) -> Stats:
        with self._lock:
            hosts = {name: replace(host) for name, host in self._stats.hosts.items()}
            statuses, agents = self._stats.statuses.copy(), self._stats.user_agents.copy()
            return replace(self._stats, statuses=statuses, user_agents=agents, hosts=hosts)
