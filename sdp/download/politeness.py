"""How many requests a host gets: so many at once, so many a second, fewer when it asks for less.

`HostBudgets` is the truth about hosts, kept in one place for the whole cluster. `Turnstile` is one worker's queue in
front of it: it lets through what the budgets allow, hosts taking turns. Both are told the time; neither has a clock.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Job = TypeVar("Job")

WAIT_FOR_RELEASE = float("inf")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_RECOVERY_S = 30.0
_RECOVERY_ANSWERS = 20
"""After so long, or so many requests served, without a complaint a host's rate is doubled, until it is what it was."""
_SLOWEST = 1 / 64
_FORGET_S = 120.0
"""A host that nobody has asked for so long, and that has not complained, is forgotten."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What one host is asked to bear, over all workers."""

    at_once: int = 16
    per_second: float | None = None

    @property
    def burst(self) -> float:
        """Requests that may begin together; the steady rate is lower by as much, so that no second sees more."""
        return max(1.0, (self.per_second or 0.0) / 10)

    @property
    def steady(self) -> float:
        rate = self.per_second or 0.0
        return rate - self.burst if rate >= 2 else rate


@dataclass(slots=True)
class _Host:
    in_use: int = 0
    tokens: float = 1.0
    counted_at: float = 0.0
    blocked_until: float = 0.0
    complaints: int = 0
    slowdown: float = 1.0
    complained_at: float = 0.0
    served: int = 0
    """Requests answered since the last complaint, or since the last one was forgiven."""
    used_at: float = 0.0

    def forgive(self) -> None:
        """Take one complaint back."""
        self.complaints -= 1
        self.slowdown = min(1.0, self.slowdown * 2)


class HostBudgets:
    """The budget of every host that somebody asked for lately."""

    def __init__(self, limits: HostLimits) -> None:
        self._limits = limits
        self._hosts: dict[str, _Host] = {}
        self._swept_at = 0.0

    def acquire(self, host: str, now: float) -> float:
        """0 and a request may begin now; otherwise after how many seconds to ask again (or WAIT_FOR_RELEASE)."""
        self._sweep(now)
        known = self._hosts.get(host)
        if known is None:
            known = self._hosts[host] = _Host(tokens=self._limits.burst, counted_at=now)
        known.used_at = now
        if known.blocked_until > now:
            return known.blocked_until - now
        self._recover(known, now)
        if known.in_use >= max(1, int(self._limits.at_once * known.slowdown)):
            return WAIT_FOR_RELEASE
        if self._limits.per_second is not None:
            rate = self._limits.steady * known.slowdown
            known.tokens = min(self._limits.burst, known.tokens + (now - known.counted_at) * rate)
            known.counted_at = now
            if known.tokens < 1 - 1e-9:
                return (1 - known.tokens) / rate
            known.tokens -= 1
        known.in_use += 1
        return 0.0

    def release(self, host: str, count: int = 1) -> None:
        """Requests that are over, or permits that were not used."""
        known = self._hosts.get(host)
        if known is not None:
            known.in_use = max(0, known.in_use - count)

    def served(self, host: str, count: int = 1) -> None:
        """Requests that the host has answered without asking for less."""
        known = self._hosts.get(host)
        if known is None or not known.complaints:
            return
        known.served += count
        while known.complaints and known.served >= _RECOVERY_ANSWERS:
            known.served -= _RECOVERY_ANSWERS
            known.forgive()

    def hold(self, host: str, count: int, now: float) -> None:
        """Take note of requests that are under way already."""
        known = self._hosts.setdefault(host, _Host(tokens=self._limits.burst, counted_at=now, used_at=now))
        known.in_use += count

    def throttle(self, host: str, now: float, retry_after: float | None = None) -> float:
        """The host said 429 or 503: leave it alone for a while and go on more slowly. Returns for how long."""
        known = self._hosts.setdefault(host, _Host(tokens=self._limits.burst, counted_at=now))
        known.used_at = now
        if known.blocked_until > now and retry_after is None:
            return known.blocked_until - now  # one of several answers to the same burst
        if known.blocked_until <= now:
            pause = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**known.complaints)
            known.complaints += 1
            known.slowdown = max(_SLOWEST, known.slowdown / 2)
            known.complained_at, known.served = now, 0
        else:
            pause = 0.0
        known.blocked_until = max(known.blocked_until, now + max(pause, retry_after or 0.0))
        return known.blocked_until - now

    def __len__(self) -> int:
        return len(self._hosts)

    def _recover(self, known: _Host, now: float) -> None:
        since = max(known.complained_at, known.blocked_until)
        while known.complaints and now - since >= _RECOVERY_S:
            known.forgive()
            since = known.complained_at = since + _RECOVERY_S

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < _FORGET_S:
            return
        self._swept_at = now
        for host, known in list(self._hosts.items()):
            idle = now - max(known.used_at, known.blocked_until) > _FORGET_S
            if idle and not known.in_use and not known.complaints:
                del self._hosts[host]


@dataclass(frozen=True, slots=True)
class Ask:
    """What one worker tells and wants, in one message."""

    worker: str
    holding: Mapping[str, int]
    """Its requests under way and permits not yet used, by host: all of them, so that nothing drifts."""
    wants: Mapping[str, int]
    throttled: Mapping[str, float | None]
    """Hosts that said 429 or 503 since the last time, with their Retry-After."""
    served: Mapping[str, int] = field(default_factory=dict)
    """How many requests each host has answered otherwise since then."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What it may do."""

    permits: Mapping[str, int]
    waits: Mapping[str, float]
    """Hosts that are blocked, and for how many seconds."""


class SharedBudgets:
    """The budgets of a cluster of workers, which come and go."""

    def __init__(self, limits: HostLimits, forget_worker_s: float = 30.0) -> None:
        self._budgets = HostBudgets(limits)
        self._forget_worker_s = forget_worker_s
        self._held: dict[str, dict[str, int]] = {}
        self._heard_at: dict[str, float] = {}

    def exchange(self, ask: Ask, now: float) -> Answer:
        """Take note of what a worker holds, and give it what can be given."""
        self._forget(now)
        self._heard_at[ask.worker] = now
        held = self._held.setdefault(ask.worker, {})
        for host in held.keys() | ask.holding.keys():
            change = ask.holding.get(host, 0) - held.get(host, 0)
            if change > 0:
                self._budgets.hold(host, change, now)
            elif change < 0:
                self._budgets.release(host, -change)
        held = self._held[ask.worker] = dict(ask.holding)
        for host, count in ask.served.items():
            self._budgets.served(host, count)
        for host, retry_after in ask.throttled.items():
            self._budgets.throttle(host, now, retry_after)
        permits, waits = {}, {}
        for host, count in ask.wants.items():
            given = 0
            while given < count:
                wait = self._budgets.acquire(host, now)
                if wait:
                    if wait != WAIT_FOR_RELEASE:
                        waits[host] = wait
                    break
                given += 1
            if given:
                permits[host] = given
                held[host] = held.get(host, 0) + given
        return Answer(permits, waits)

    def leave(self, worker: str) -> None:
        """A worker is gone: what it held is free."""
        for host, count in self._held.pop(worker, {}).items():
            self._budgets.release(host, count)
        self._heard_at.pop(worker, None)

    def _forget(self, now: float) -> None:
        for worker, heard_at in list(self._heard_at.items()):
            if now - heard_at > self._forget_worker_s:
                self.leave(worker)


class Gate(Protocol):
    """Where a worker asks for the next request to a host."""

    def acquire(self, host: str, now: float) -> float | None:
        """0: go. Seconds: ask again then. None: enough is being asked for already, try no further host now."""

    def release(self, host: str, *, served: bool = False) -> None:
        """A request is over; `served` if the host answered and did not ask for less."""

    def throttle(self, host: str, now: float, retry_after: float | None) -> None: ...


class LocalGate:
    """The gate of a worker that is alone: the budgets are its own."""

    def __init__(self, limits: HostLimits) -> None:
        self._budgets = HostBudgets(limits)

    def acquire(self, host: str, now: float) -> float | None:
        return self._budgets.acquire(host, now)

    def release(self, host: str, *, served: bool = False) -> None:
        self._budgets.release(host)
        if served:
            self._budgets.served(host)

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:
        self._budgets.throttle(host, now, retry_after)


@dataclass(slots=True)
class SharedGate:
    """The gate of one worker among several. `ask` and `take` are its two ends of an exchange with SharedBudgets."""

    worker: str
    ahead: int
    """Permits that are asked for ahead of their use."""
    _permits: dict[str, int] = field(default_factory=dict)
    _in_flight: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _wants: dict[str, int] = field(default_factory=dict)
    _throttled: dict[str, float | None] = field(default_factory=dict)
    _served: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _unused: int = 0
    has_news: bool = False
    """Whether there is something to tell or to ask."""

    def acquire(self, host: str, now: float) -> float | None:  # noqa: ARG002 (the protocol's)
        if self._permits.get(host):
            self._permits[host] -= 1
            self._unused -= 1
            self._in_flight[host] += 1
            return 0.0
        if host not in self._wants and len(self._wants) + self._unused >= self.ahead:
            return None
        self._wants[host] = 0
        self.has_news = True
        return WAIT_FOR_RELEASE

    def release(self, host: str, *, served: bool = False) -> None:
        self.has_news = True
        if served:
            self._served[host] += 1
        self._in_flight[host] -= 1
        if not self._in_flight[host]:
            del self._in_flight[host]

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:  # noqa: ARG002 (the protocol's)
        self._unused -= self._permits.pop(host, 0)
        self._throttled[host] = max(retry_after or 0.0, self._throttled.get(host) or 0.0) or None

    @property
    def is_waiting(self) -> bool:
        """Whether something that was asked for has not come."""
        return bool(self._wants)

    def ask(self, queued: Mapping[str, int]) -> Ask:
        """The message to the budgets, given how many jobs wait for each host. Permits nobody waits for go back."""
        for host in [host for host, count in self._permits.items() if count > queued.get(host, 0)]:
            self._unused -= self._permits[host] - queued.get(host, 0)
            self._permits[host] = queued.get(host, 0)
        self._permits = {host: count for host, count in self._permits.items() if count}
        holding = dict(self._in_flight)
        for host, count in self._permits.items():
            holding[host] = holding.get(host, 0) + count
        share = max(1, self.ahead // max(1, len(self._wants)))
        wants = {
            host: min(queued[host] - self._permits.get(host, 0), share) for host in self._wants if queued.get(host)
        }
        throttled, self._throttled = self._throttled, {}
        served, self._served = dict(self._served), defaultdict(int)
        self.has_news = False
        return Ask(self.worker, holding, {host: count for host, count in wants.items() if count > 0}, throttled, served)

    def take(self, asked: Ask, answer: Answer) -> Mapping[str, float]:
        """Take in the answer. Returns which hosts' jobs can be looked at again, and after how many seconds."""
        for host, count in answer.permits.items():
            self._permits[host] = self._permits.get(host, 0) + count
            self._unused += count
        again = dict.fromkeys(answer.permits, 0.0)
        for host in list(self._wants):
            if host in answer.waits:
                del self._wants[host]
                again.setdefault(host, answer.waits[host])
            elif host in answer.permits or host not in asked.wants:
                del self._wants[host]
                again.setdefault(host, 0.0)
        return again


class Turnstile(Generic[Job]):
    """The jobs of one worker that wait for their host's turn."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._queues: dict[str, deque[Job]] = {}
        self._runnable: deque[str] = deque()
        """Hosts worth asking for, in turn; a host stands in one of these three places or has no jobs."""
        self._parked: set[str] = set()
        self._timed: list[tuple[float, str]] = []
        self._waiting = 0

    def push(self, host: str, job: Job, *, first: bool = False) -> None:
        """Add a job; `first` puts it before the host's others."""
        queue = self._queues.get(host)
        if queue is None:
            queue = self._queues[host] = deque()
            self._runnable.append(host)
        queue.appendleft(job) if first else queue.append(job)
        self._waiting += 1

    def take(self, now: float) -> tuple[str, Job] | None:
        """The next job that may begin; its host's `done` must be called in the end."""
        while self._timed and self._timed[0][0] <= now:
            self.unpark(heapq.heappop(self._timed)[1])
        for _ in range(len(self._runnable)):
            host = self._runnable[0]
            wait = self._gate.acquire(host, now)
            if wait is None:
                return None
            self._runnable.popleft()
            if wait:
                self._parked.add(host)
                if wait != WAIT_FOR_RELEASE:
                    heapq.heappush(self._timed, (now + wait, host))
                continue
            queue = self._queues[host]
            job = queue.popleft()
            self._waiting -= 1
            if queue:
                self._runnable.append(host)
            else:
                del self._queues[host]
            return host, job
        return None

    def done(self, host: str, *, served: bool = False) -> None:
        """A request to the host is over; `served` if it was answered and less was not asked for."""
        self._gate.release(host, served=served)
        self.unpark(host)

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:
        self._gate.throttle(host, now, retry_after)

    def unpark(self, host: str) -> None:
        """The host may be worth asking for again."""
        if host in self._parked:
            self._parked.discard(host)
            self._runnable.append(host)

    def unpark_later(self, hosts: Mapping[str, float], now: float) -> None:
        """What a shared gate's exchange brought."""
        for host, wait in hosts.items():
            if not wait:
                self.unpark(host)
            elif host in self._parked:
                heapq.heappush(self._timed, (now + wait, host))

    def drain(self, host: str) -> Iterable[Job]:
        """Take out all jobs of a host, without its turn."""
        jobs = self._queues.pop(host, deque())
        self._waiting -= len(jobs)
        self._parked.discard(host)
        if host in self._runnable:
            self._runnable.remove(host)
        return jobs

    def next_at(self) -> float | None:
        """When a host that waits for its time can be asked for again."""
        return self._timed[0][0] if self._timed else None

    def queued(self) -> dict[str, int]:
        """How many jobs wait for each host."""
        return {host: len(queue) for host, queue in self._queues.items()}

    @property
    def runnable(self) -> int:
        """Hosts that could be asked for right now."""
        return len(self._runnable)

    def __len__(self) -> int:
        return self._waiting
