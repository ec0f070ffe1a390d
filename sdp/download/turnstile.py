"""One worker's queue of requests, and the gates through which it asks for the hosts' budgets.

The turnstile lets requests through as its gate allows, and the hosts take turns.
"""

import heapq
import math
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sdp.download.budgets import WAIT_FOR_RELEASE, Answer, Ask, HostBudgets

Job = TypeVar("Job")
_HEARTBEAT_S = 5.0
"""The longest pause between messages to the shared budgets, which forget a worker after 30 s."""
_WHOLE_EVERY = 64
"""Messages of which one names all that a worker holds."""


@dataclass(slots=True)
class SharedGate:
    """The gate of one worker among several, which exchanges messages with SharedBudgets, one at a time."""

    worker: str
    ahead: int
    """Permits to hold in advance."""
    exchange: Callable[[Ask], Future[Answer]]
    every_s: float
    """Seconds between messages, if there is anything to say."""
    _sent: tuple[Ask, Future[Answer]] | None = None
    _sent_at: float = -math.inf
    _permits: Counter[str] = field(default_factory=Counter)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _wants: dict[str, None] = field(default_factory=dict)
    _throttled: dict[str, float | None] = field(default_factory=dict)
    _served: Counter[str] = field(default_factory=Counter)
    _known: Counter[str] = field(default_factory=Counter)
    """The holdings of this worker that the shared budgets know."""
    _until_whole: int = 0
    """Messages before the next one that names all."""
    _has_news: bool = False
    """True if there is a message to send."""

    def step(self, turnstile: "Turnstile[Any]", now: float, on_reply: Callable[[], None]) -> None:
        """Read a reply that has come, and send the next message when it is due."""
        if self._sent is not None:
            ask, reply = self._sent
            if not reply.done():
                return
            self._sent = None
            turnstile.unpark_later(self.take(ask, reply.result()), now)
        silent_s = now - self._sent_at
        if silent_s >= self.every_s and (self._has_news or self._wants or silent_s > _HEARTBEAT_S):
            ask, self._sent_at = self.ask(turnstile.queued()), now
            reply = self.exchange(ask)
            self._sent = ask, reply
            reply.add_done_callback(lambda _: on_reply())

    def acquire(self, host: str, now: float) -> float | None:  # noqa: ARG002 (as HostBudgets')
        if self._permits[host]:
            self._permits[host] -= 1
            self._in_flight[host] += 1
            return 0.0
        if host not in self._wants and len(self._wants) + self._permits.total() >= self.ahead:
            return None
        self._wants[host] = None
        self._has_news = True
        return WAIT_FOR_RELEASE

    def release(self, host: str) -> None:
        self._has_news = True
        self._in_flight[host] -= 1
        if not self._in_flight[host]:
            del self._in_flight[host]

    def served(self, host: str) -> None:
        self._served[host] += 1

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:  # noqa: ARG002 (as HostBudgets')
        self._permits.pop(host, None)
        self._throttled[host] = max(retry_after or 0.0, self._throttled.get(host) or 0.0) or None

    def ask(self, queued: Mapping[str, int]) -> Ask:
        """Return the next message, given the number of jobs that wait for each host; spare permits are given back."""
        self._permits &= Counter(queued)
        share = max(1, self.ahead // max(1, len(self._wants)))
        wants = Counter({host: min(queued.get(host, 0) - self._permits[host], share) for host in self._wants})
        holding, whole = self._in_flight + self._permits, not self._until_whole
        hosts = holding if whole else [h for h in holding.keys() | self._known.keys() if holding[h] != self._known[h]]
        changed = {host: holding[host] for host in hosts}
        ask = Ask(self.worker, changed, +wants, self._throttled, self._served, whole)
        self._known = holding
        self._until_whole = (self._until_whole or _WHOLE_EVERY) - 1
        self._throttled, self._served, self._has_news = {}, Counter(), False
        return ask

    def take(self, asked: Ask, answer: Answer) -> Mapping[str, float]:
        """Record a reply; return the hosts to try again, and after how many seconds."""
        self._permits.update(answer.permits)
        self._known.update(answer.permits)
        if not answer.known:
            self._until_whole = 0
        retries = dict.fromkeys(answer.permits, 0.0)
        for host in list(self._wants):
            if host in answer.waits or host in answer.permits or host not in asked.wants:
                del self._wants[host]
                retries.setdefault(host, answer.waits.get(host, 0.0))
        return retries


Gate = HostBudgets | SharedGate
"""A worker's access to the hosts' budgets: permission for each request to a host."""


class Turnstile(Generic[Job]):
    """The jobs of one worker that wait for their host's turn."""

    def __init__(self, *gates: Gate) -> None:
        """Set up the queue; each of several gates has its share of the hosts."""
        self._gates = gates
        self._queues: dict[str, deque[Job]] = {}
        self._runnable: OrderedDict[str, None] = OrderedDict()
        """Hosts to try, in turn. A host with jobs is either here or parked, and a parked one may have a time."""
        self._parked: set[str] = set()
        self._timed: list[tuple[float, str]] = []

    def push(self, host: str, job: Job, *, first: bool = False) -> None:
        """Add a job; `first` puts it before the host's others."""
        if (jobs := self._queues.get(host)) is None:
            jobs = self._queues[host] = deque()
            self._runnable[host] = None
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)

    def take(self, now: float) -> tuple[str, Job] | None:
        """Return the next job that may begin; call `done` for its host when it ends."""
        while self._timed and self._timed[0][0] <= now:
            self.unpark(heapq.heappop(self._timed)[1])
        for _ in range(len(self._runnable)):
            host = next(iter(self._runnable))
            if (wait := self._gate(host).acquire(host, now)) is None:
                return None
            del self._runnable[host]
            if wait:
                self._parked.add(host)
                if wait != WAIT_FOR_RELEASE:
                    heapq.heappush(self._timed, (now + wait, host))
                continue
            jobs = self._queues[host]
            job = jobs.popleft()
            if jobs:
                self._runnable[host] = None
            else:
                del self._queues[host]
            return host, job
        return None

    def done(self, host: str, *, served: bool = False) -> None:
        """End a request to a host; `served` if it answered without a complaint."""
        self._gate(host).release(host)
        if served:
            self._gate(host).served(host)
        self.unpark(host)

    def throttle(self, host: str, now: float, retry_after: float | None) -> None:
        self._gate(host).throttle(host, now, retry_after)

    def unpark(self, host: str) -> None:
        """Try a host again."""
        if host in self._parked:
            self._parked.discard(host)
            self._runnable[host] = None

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
        self._parked.discard(host)
        self._runnable.pop(host, None)
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

    def _gate(self, host: str) -> Gate:
        return self._gates[zlib.crc32(host.encode()) % len(self._gates)]
