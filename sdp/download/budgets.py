"""Budgets of hosts: the requests that a host gets at once and per second, fewer when it asks for less.

`HostBudgets` holds the budgets of every host, `SharedBudgets` those of a whole cluster, which workers ask by messages.
The caller passes the time; no clock is read here.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sdp.backoff import backoff
from sdp.config.download import HostsConfig

WAIT_FOR_RELEASE = float("inf")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_RECOVERY_S = 30.0
_RECOVERY_ANSWERS = 20
"""A host's rate doubles, up to its limit, after this time or this many served requests without a complaint."""
_SLOWEST = 1 / 64
_FORGET_S = 120.0
"""A host without requests or complaints for this long is forgotten."""
_FORGET_WORKER_S = 30.0
_SWEPT_AT_ONCE = 4
"""Hosts that each request may forget: more than one, so that they are forgotten faster than they are added."""


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
    """Requests served since the last complaint, or since one was forgiven."""
    used_at: float = 0.0

    def forgive(self) -> None:
        """Forgive one complaint."""
        self.complaints -= 1
        self.slowdown = min(1.0, self.slowdown * 2)


class HostBudgets:
    """The budgets of all hosts with recent requests."""

    def __init__(self, limits: HostsConfig) -> None:
        self._limits = limits
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        """The longest unused first."""

    def acquire(self, host: str, now: float) -> float:
        """Return 0 if a request may begin; otherwise the seconds until the next try, or WAIT_FOR_RELEASE."""
        self._sweep(now)
        budget = self._budget(host, now)
        if budget.blocked_until > now:
            return budget.blocked_until - now
        self._recover(budget, now)
        if budget.in_use >= max(1, int(self._limits.at_once * budget.slowdown)):
            return WAIT_FOR_RELEASE
        if self._limits.per_second is not None:
            rate = self._limits.steady * budget.slowdown
            budget.tokens = min(self._limits.burst, budget.tokens + (now - budget.counted_at) * rate)
            budget.counted_at = now
            if budget.tokens < 1 - 1e-9:
                return (1 - budget.tokens) / rate
            budget.tokens -= 1
        budget.in_use += 1
        return 0.0

    def release(self, host: str, count: int = 1) -> None:
        """Release permits of requests that have ended or will not begin."""
        if budget := self._hosts.get(host):
            budget.in_use = max(0, budget.in_use - count)

    def served(self, host: str, count: int = 1) -> None:
        """Count requests that the host has answered without a complaint."""
        budget = self._hosts.get(host)
        if budget is None or not budget.complaints:
            return
        budget.served += count
        while budget.complaints and budget.served >= _RECOVERY_ANSWERS:
            budget.served -= _RECOVERY_ANSWERS
            budget.forgive()

    def hold(self, host: str, count: int, now: float) -> None:
        """Count requests that are under way already."""
        self._budget(host, now).in_use += count

    def throttle(self, host: str, now: float, retry_after: float | None = None) -> None:
        """Pause and slow down a host that has answered 429 or 503."""
        budget = self._budget(host, now)
        if budget.blocked_until > now and retry_after is None:
            return  # one of several responses to the same burst
        pause_s = 0.0
        if budget.blocked_until <= now:
            pause_s = backoff(budget.complaints, _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
            budget.complaints += 1
            budget.slowdown = max(_SLOWEST, budget.slowdown / 2)
            budget.complained_at, budget.served = now, 0
        budget.blocked_until = max(budget.blocked_until, now + max(pause_s, retry_after or 0.0))

    def _budget(self, host: str, now: float) -> _Host:
        if (budget := self._hosts.get(host)) is None:
            budget = self._hosts[host] = _Host(tokens=self._limits.burst, counted_at=now)
        else:
            self._hosts.move_to_end(host)
        budget.used_at = now
        return budget

    def _recover(self, budget: _Host, now: float) -> None:
        since = max(budget.complained_at, budget.blocked_until)
        while budget.complaints and now - since >= _RECOVERY_S:
            budget.forgive()
            since = budget.complained_at = since + _RECOVERY_S

    def _sweep(self, now: float) -> None:
        """Forget idle hosts, a few at a time: all of millions at once would hold up every worker."""
        for _ in range(min(_SWEPT_AT_ONCE, len(self._hosts))):
            host, budget = next(iter(self._hosts.items()))
            if now - budget.used_at <= _FORGET_S:
                return
            self._recover(budget, now)
            if budget.in_use or budget.complaints or now - budget.blocked_until <= _FORGET_S:
                self._hosts.move_to_end(host)
            else:
                del self._hosts[host]


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker's message to the shared budgets."""

    worker: str
    holding: Mapping[str, int]
    """Its requests under way and unused permits by host: all, or those that differ from what the budgets know."""
    wants: Mapping[str, int]
    """The permits that it asks for, by host."""
    throttled: Mapping[str, float | None]
    """Hosts that have answered 429 or 503 since the last message, with their Retry-After."""
    served: Mapping[str, int] = field(default_factory=dict)
    """Other responses since the last message, by host."""
    whole: bool = True
    """True if `holding` names all, as it does now and then, so that no error lasts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The shared budgets' reply."""

    permits: Mapping[str, int]
    waits: Mapping[str, float]
    """Seconds that blocked hosts stay blocked."""
    known: bool = True
    """False if the budgets have restarted or forgotten the worker, and need the whole."""


class SharedBudgets:
    """The budgets of a cluster, whose workers come and go."""

    def __init__(self, limits: HostsConfig) -> None:
        self._budgets = HostBudgets(limits)
        self._workers: dict[str, tuple[float, dict[str, int]]] = {}
        """The time of each worker's last message, and its permits by host; the longest silent first."""

    def exchange(self, ask: Ask, now: float) -> Answer:
        """Record what a worker holds, and grant what the budgets allow."""
        self._forget(now)
        known = ask.whole or ask.worker in self._workers
        if known:
            _, held = self._workers.pop(ask.worker, (now, {}))
            self._workers[ask.worker] = now, held
            hosts = held.keys() | ask.holding.keys() if ask.whole else ask.holding.keys()
            for host in list(hosts):
                self._hold(host, held, ask.holding.get(host, 0), now)
        for host, count in ask.served.items():
            self._budgets.served(host, count)
        for host, retry_after in ask.throttled.items():
            self._budgets.throttle(host, now, retry_after)
        if not known:
            return Answer({}, {}, known=False)
        permits, waits = {}, {}
        for host, count in ask.wants.items():
            granted = 0
            while granted < count and not (wait := self._budgets.acquire(host, now)):
                granted += 1
            if granted < count and wait != WAIT_FOR_RELEASE:
                waits[host] = wait
            if granted:
                permits[host] = granted
                held[host] = held.get(host, 0) + granted
        return Answer(permits, waits)

    def _hold(self, host: str, held: dict[str, int], count: int, now: float) -> None:
        """Record what a worker holds of a host."""
        change = count - held.pop(host, 0)
        if change > 0:
            self._budgets.hold(host, change, now)
        elif change < 0:
            self._budgets.release(host, -change)
        if count:
            held[host] = count

    def _forget(self, now: float) -> None:
        """Release all that silent workers held."""
        while self._workers:
            worker, (heard_at, held) = next(iter(self._workers.items()))
            if now - heard_at <= _FORGET_WORKER_S:
                return
            del self._workers[worker]
            for host, count in held.items():
                self._budgets.release(host, count)
