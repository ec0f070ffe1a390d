"""One worker's queue of requests, and the gates through which it asks for the hosts' budgets.

The turnstile lets requests through as its gate allows, and the hosts take turns.
"""

import heapq
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sdp.download.budgets import WAIT_FOR_RELEASE, Answer, Ask, HostBudgets, HostLimits

Job = TypeVar("Job")
_JOIN_S = 30.0


class LocalGate:
    """The gate of a single worker, which has the budgets to itself."""

    def __init__(self, limits: HostLimits) -> None:
        self._budgets = HostBudgets(limits)

    def acquire(self, host: str, now: float) -> float | None:
        """Return 0 to begin a request, or the seconds until the next try; None if no further host may be tried now."""
        return self._budgets.acquire(host, now)

    def release(self, host: str, *, served: bool = False) -> None:
        """End a request; `served` if the host answered without a complaint."""
        self._budgets.release(host)
        if served:
            self._budgets.served(host)

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:
        """Record that the host has answered 429 or 503."""
        self._budgets.throttle(host, now, retry_after)


@dataclass(slots=True)
class SharedGate:
    """The gate of one worker among several. `ask` and `take` are its side of an exchange with SharedBudgets."""

    worker: str
    ahead: int
    """Permits to hold in advance."""
    _permits: dict[str, int] = field(default_factory=dict)
    _in_flight: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _wants: dict[str, None] = field(default_factory=dict)
    _throttled: dict[str, float | None] = field(default_factory=dict)
    _served: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _unused: int = 0
    has_news: bool = False
    """True if there is a message to send."""

    def acquire(self, host: str, now: float) -> float | None:  # noqa: ARG002 (as LocalGate's)
        if self._permits.get(host):
            self._permits[host] -= 1
            self._unused -= 1
            self._in_flight[host] += 1
            return 0.0
        if host not in self._wants and len(self._wants) + self._unused >= self.ahead:
            return None
        self._wants[host] = None
        self.has_news = True
        return WAIT_FOR_RELEASE

    def release(self, host: str, *, served: bool = False) -> None:
        self.has_news = True
        if served:
            self._served[host] += 1
        self._in_flight[host] -= 1
        if not self._in_flight[host]:
            del self._in_flight[host]

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:  # noqa: ARG002 (as LocalGate's)
        self._unused -= self._permits.pop(host, 0)
        self._throttled[host] = max(retry_after or 0.0, self._throttled.get(host) or 0.0) or None

    @property
    def is_waiting(self) -> bool:
        """Return whether some permits that were asked for have not come."""
        return bool(self._wants)

    def ask(self, queued: Mapping[str, int]) -> Ask:
        """Return the next message, given the number of jobs that wait for each host; spare permits are given back."""
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
        """Record a reply; return the hosts to try again, and after how many seconds."""
        for host, count in answer.permits.items():
            self._permits[host] = self._permits.get(host, 0) + count
            self._unused += count
        retries = dict.fromkeys(answer.permits, 0.0)
        for host in list(self._wants):
            if host in answer.waits or host in answer.permits or host not in asked.wants:
                del self._wants[host]
                retries.setdefault(host, answer.waits.get(host, 0.0))
        return retries


Gate = LocalGate | SharedGate
"""A worker's access to the hosts' budgets: permission for each request to a host."""


class Courier:
    """A thread that carries a shared gate's messages to the budgets and back, one at a time."""

    def __init__(self, exchange: Callable[[Ask], Answer], every_s: float) -> None:
        self._exchange, self._every_s = exchange, every_s
        self.on_answer: Callable[[], None] = lambda: None
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._answers: deque[tuple[Ask, Answer]] = deque()
        self._under_way = False
        self._sent_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="sdp-courier", daemon=True)
        self._thread.start()

    def ready(self, now: float) -> bool:
        return not self._under_way and now - self._sent_at >= self._every_s

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last message."""
        return now - self._sent_at

    def send(self, ask: Ask, now: float) -> None:
        self._under_way, self._sent_at = True, now
        self._asks.put(ask)

    def answers(self) -> Iterator[tuple[Ask, Answer]]:
        while self._answers:
            yield self._answers.popleft()

    def close(self) -> None:
        self._asks.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (ask := self._asks.get()) is not None:
            self._answers.append((ask, self._exchange(ask)))
            self._under_way = False
            self.on_answer()


class Turnstile(Generic[Job]):
    """The jobs of one worker that wait for their host's turn."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._queues: dict[str, deque[Job]] = {}
        self._runnable: deque[str] = deque()
        """Hosts to try, in turn. A host with jobs is either here or parked, and a parked one may have a time."""
        self._parked: set[str] = set()
        self._timed: list[tuple[float, str]] = []
        self._waiting = 0

    def push(self, host: str, job: Job, *, first: bool = False) -> None:
        """Add a job; `first` puts it before the host's others."""
        jobs = self._queues.get(host)
        if jobs is None:
            jobs = self._queues[host] = deque()
            self._runnable.append(host)
        jobs.appendleft(job) if first else jobs.append(job)
        self._waiting += 1

    def take(self, now: float) -> tuple[str, Job] | None:
        """Return the next job that may begin; call `done` for its host when it ends."""
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
            jobs = self._queues[host]
            job = jobs.popleft()
            self._waiting -= 1
            if jobs:
                self._runnable.append(host)
            else:
                del self._queues[host]
            return host, job
        return None

    def done(self, host: str, *, served: bool = False) -> None:
        """End a request to a host; `served` if it answered without a complaint."""
        self._gate.release(host, served=served)
        self.unpark(host)

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:
        self._gate.throttle(host, now, retry_after)

    def unpark(self, host: str) -> None:
        """Try a host again."""
        if host in self._parked:
            self._parked.discard(host)
            self._runnable.append(host)

    def unpark_later(self, hosts: Mapping[str, float], now: float) -> None:
        """Try hosts again after the seconds that a shared gate's exchange returned."""
        for host, wait in hosts.items():
            if not wait:
                self.unpark(host)
            elif host in self._parked:
                heapq.heappush(self._timed, (now + wait, host))

    def drain(self, host: str) -> Iterable[Job]:
        """Remove and return all jobs of a host."""
        jobs = self._queues.pop(host, deque())
        self._waiting -= len(jobs)
        self._parked.discard(host)
        if host in self._runnable:
            self._runnable.remove(host)
        return jobs

    def next_at(self) -> float | None:
        """Return the time at which the next timed host can be tried."""
        return self._timed[0][0] if self._timed else None

    def queued(self) -> dict[str, int]:
        """Count the jobs that wait for each host."""
        return {host: len(jobs) for host, jobs in self._queues.items()}

    @property
    def runnable(self) -> int:
        """The number of hosts that can be tried now."""
        return len(self._runnable)

    def __len__(self) -> int:
        return self._waiting
