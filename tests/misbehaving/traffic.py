"""Counts of what the image server saw, by which a test judges how polite a client is."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

KEPT_VISITS = 100_000
"""The latest visits are kept one by one; older ones live on in the counters only."""


@dataclass(slots=True)
class Visit:
    """One request and what became of it. Times are seconds of the machine's monotonic clock."""

    number: int
    connection: int
    host: str
    method: str
    target: str
    """Path and query, as they came."""
    user_agent: str
    attempt: int
    """1 for the first request of this target at this host."""
    began: float
    ended: float | None = None
    """Time when the last byte went to the kernel, or the connection ended."""
    behaviour: str = ""
    """Name of the behaviour in place of a plain answer, such as `stall`; empty for a plain one."""
    status: int | None = None
    sent: int = 0
    outcome: str = ""
    """done: as the server meant it; left: the client went first; expired: the server's patience ended."""


@dataclass(frozen=True, slots=True)
class HostStats:
    """The statistics of one virtual host."""

    requests: int
    in_flight: int
    max_concurrent: int
    """The most requests that were unanswered at once."""
    max_per_second: int
    """The most requests that began within any one second."""
    connections: int
    max_connections: int
    """The most connections that were open at once."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The statistics of the whole server since it started or was reset."""

    requests: int
    in_flight: int
    max_concurrent: int
    connections: int
    """Number of connections ever opened."""
    open_connections: int
    max_connections: int
    failed_handshakes: int
    bytes_sent: int
    attempts: dict[str, int]
    """Requests by target, over all hosts."""
    statuses: dict[int, int]
    outcomes: dict[str, int]
    user_agents: dict[str, int]
    hosts: dict[str, HostStats]
    """By the Host header without its port."""


@dataclass(slots=True)
class _Host:
    requests: int = 0
    in_flight: int = 0
    max_concurrent: int = 0
    max_per_second: int = 0
    last_second: deque[float] = field(default_factory=deque)
    connections: int = 0
    open_connections: int = 0
    max_connections: int = 0


class Traffic:
    """Counts visits; written by the server's thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        """The lock for everything, which also notifies those in `wait_for` of changes."""
        self._last_number = 0
        self._connection_numbers = itertools.count(1)
        self._open = 0
        self._in_flight = 0
        self._hosts: dict[str, _Host] = {}
        self._clear()

    def _clear(self) -> None:
        self._requests = 0
        self._connections = 0
        self._max_open = self._open
        self._max_concurrent = self._in_flight
        self._failed_handshakes = 0
        self._bytes = 0
        self._attempts: Counter[tuple[str, str]] = Counter()
        self._statuses: Counter[int] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._user_agents: Counter[str] = Counter()
        self._visits: deque[Visit] = deque(maxlen=KEPT_VISITS)
        self._forgotten = self._last_number

    def reset(self) -> None:
        """Forget everything but what is going on now."""
        with self._lock:
            self._clear()
            self._hosts = {
                name: _Host(
                    in_flight=host.in_flight,
                    max_concurrent=host.in_flight,
                    open_connections=host.open_connections,
                    max_connections=host.open_connections,
                )
                for name, host in self._hosts.items()
                if host.in_flight or host.open_connections
            }

    def opened(self) -> int:
        """A connection was made; returns its number."""
        with self._lock:
            self._connections += 1
            self._open += 1
            self._max_open = max(self._max_open, self._open)
            self._lock.notify_all()
            return next(self._connection_numbers)

    def closed(self, host: str | None) -> None:
        """Record the end of a connection; `host` is the value passed to `named`."""
        with self._lock:
            self._open -= 1
            if host is not None:
                self._hosts[host].open_connections -= 1
            self._lock.notify_all()

    def named(self, host: str) -> None:
        """A connection's first request named its host."""
        with self._lock:
            known = self._hosts.setdefault(host, _Host())
            known.connections += 1
            known.open_connections += 1
            known.max_connections = max(known.max_connections, known.open_connections)

    def handshake_failed(self) -> None:
        with self._lock:
            self._failed_handshakes += 1
            self._lock.notify_all()

    def begin(self, connection: int, host: str, method: str, target: str, user_agent: str) -> Visit:
        """A request has come in whole."""
        now = time.monotonic()
        with self._lock:
            self._requests += 1
            self._in_flight += 1
            if self._in_flight > self._max_concurrent:
                self._max_concurrent = self._in_flight
            known = self._hosts.get(host)
            if known is None:
                known = self._hosts[host] = _Host()
            known.requests += 1
            known.in_flight += 1
            if known.in_flight > known.max_concurrent:
                known.max_concurrent = known.in_flight
            recent = known.last_second
            recent.append(now)
            while recent[0] <= now - 1:
                recent.popleft()
            if len(recent) > known.max_per_second:
                known.max_per_second = len(recent)
            key = (host, target)
            self._attempts[key] += 1
            self._user_agents[user_agent] += 1
            self._last_number += 1
            visit = Visit(self._last_number, connection, host, method, target, user_agent, self._attempts[key], now)
            self._visits.append(visit)
            self._lock.notify_all()
            return visit

    def end(self, visit: Visit, outcome: str) -> None:
        with self._lock:
            visit.ended = time.monotonic()
            visit.outcome = outcome
            self._lock.notify_all()
            self._in_flight -= 1
            self._hosts[visit.host].in_flight -= 1
            if visit.number <= self._forgotten:
                return
            self._outcomes[outcome] += 1
            self._bytes += visit.sent
            if visit.status is not None:
                self._statuses[visit.status] += 1

    def in_flight(self, host: str) -> int:
        with self._lock:
            return self._hosts[host].in_flight if host in self._hosts else 0

    def visits(self) -> list[Visit]:
        """The latest visits in the order in which they began."""
        with self._lock:
            return [replace(visit) for visit in self._visits]

    def wait_for(self, condition: Callable[[Stats], bool], deadline_s: float) -> Stats:
        """Wait until what was seen satisfies a condition."""
        deadline = time.monotonic() + deadline_s
        with self._lock:
            while not condition(stats := self.stats()):
                if not self._lock.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"the image server waited {deadline_s:g} s in vain; it saw {stats}")
            return stats

    def stats(self) -> Stats:
        with self._lock:
            attempts: Counter[str] = Counter()
            for (_, target), count in self._attempts.items():
                attempts[target] += count
            return Stats(
                requests=self._requests,
                in_flight=self._in_flight,
                max_concurrent=self._max_concurrent,
                connections=self._connections,
                open_connections=self._open,
                max_connections=self._max_open,
                failed_handshakes=self._failed_handshakes,
                bytes_sent=self._bytes,
                attempts=dict(attempts),
                statuses=dict(self._statuses),
                outcomes=dict(self._outcomes),
                user_agents=dict(self._user_agents),
                hosts={
                    name: HostStats(
                        host.requests,
                        host.in_flight,
                        host.max_concurrent,
                        host.max_per_second,
                        host.connections,
                        host.max_connections,
                    )
                    for name, host in self._hosts.items()
                },
            )
