"""All requests of one worker: libcurl's multi interface, driven by epoll, in one thread.

A libcurl multi handle resolves names in at most 20 threads. The hosts are spread over several such handles, so that
names whose servers do not answer delay only some of the others.

A request waits in the turnstile for its host's turn and gets one of a fixed number of slots. A temporary failure is
retried after a pause. Redirects are followed here, one request each, so that every hop is treated like the first.
"""

import contextlib
import heapq
import itertools
import math
import os
import select
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from typing import Any, Generic, TypeVar

import pycurl

from sdp.backoff import backoff
from sdp.config.download import FetchConfig, HostsConfig
from sdp.datasets.outcomes import FILTERED
from sdp.download import transfer
from sdp.download.budgets import HostBudgets
from sdp.download.robots import Robots, site_of
from sdp.download.slot import Buffer, Slot
from sdp.download.transfer import Failure
from sdp.download.turnstile import SharedGate, Turnstile
from sdp.urls import BadUrl, Url, parse, redirected

Token = TypeVar("Token")
Value = TypeVar("Value")

_TICK_S = 0.1
_QUEUE_S = 0.05
"""Time for queueing requests between two looks at the transfers."""
_SERVES_S = 60.0
"""Time after a response for which a host counts as alive, whatever else stalls."""
_KNOWN_HOSTS = 10_000
"""Hosts of which something is remembered."""
_CLOSED_HOST_S = 300.0
"""Time for which a host that does not answer gets no further requests."""
GIVE_UP_AFTER = 20
"""Failed connections in a row after which a host counts as down: fewer happen to a busy one."""
LONGEST_WAIT_S = 60.0
"""The longest Retry-After to wait for; the rows of a host that asks for more fail, and a later run retries them."""
_MOST_REDIRECTS = 5
_MULTIS = 16
"""Multi handles of a worker."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_JOIN_S = 30.0


@dataclass(slots=True)
class Request(Generic[Token]):
    """One image to fetch, and the result once it is delivered."""

    token: Token
    url: Url
    hops: int = 0
    attempts: int = 0
    seconds: float = 0.0
    """Time spent on attempts, without the pauses between them."""
    following: bool = False
    """True while a redirect is followed, which is not a new attempt."""
    failure: Failure | None = None
    """The failure of the last attempt."""
    body: Sequence[bytearray] | None = None
    """The pieces of the body; None for a failure."""
    size: int = 0
    """Bytes of the body, which its last user releases to the buffer."""
    robots_of: str = ""
    """The site whose robots.txt this request is for; empty for an image."""

    @property
    def host(self) -> str:
        return self.url.host


class _Recent(OrderedDict[str, Value]):
    """A value for each of the last _KNOWN_HOSTS hosts that got one."""

    def __setitem__(self, host: str, value: Value) -> None:
        super().__setitem__(host, value)
        self.move_to_end(host)
        if len(self) > _KNOWN_HOSTS:
            self.popitem(last=False)


class Fetcher(Generic[Token]):
    """Fetches what is submitted and delivers each result once, from its own thread."""

    def __init__(
        self,
        options: FetchConfig,
        hosts: HostsConfig,
        buffer: Buffer,
        deliver: Callable[[Request[Token]], None],
        gates: Sequence[SharedGate] = (),
        block_reason: Callable[[Url], str | None] = lambda _: None,
    ) -> None:
        """Start the thread; without shared gates, the hosts' budgets are this fetcher's own.

        `block_reason` returns the reason not to follow a redirect to a URL, if there is one.
        """
        self._fetch, self._hosts, self._deliver, self._gates = options, hosts, deliver, gates
        self._block_reason = block_reason
        self._buffer = buffer
        self._buffer.on_release = self.wake
        self._robots = Robots(options.agent) if options.robots == "honour" else None
        self._awaiting_robots: dict[str, list[Request[Token]]] = {}
        """The images that wait for their site's robots.txt."""
        self._turnstile: Turnstile[Request[Token]] = Turnstile(*gates) if gates else Turnstile(HostBudgets(hosts))
        self._incoming: deque[Request[Token]] = deque()
        self._retries: list[tuple[float, int, Request[Token]]] = []
        """A heap of the requests to retry: time, serial number, request."""
        self._serial = itertools.count()
        self._strikes = _Recent[int]()
        """The number of consecutive failures to reach each host."""
        self._served_at = _Recent[float]()
        """Time of each host's last response."""
        self._closed_hosts = _Recent[tuple[float, Failure]]()
        """The hosts that get no requests, until when, and the failure to report."""
        self._has_room = threading.Condition()
        self._closing = False
        self.error: BaseException | None = None
        """The error that has stopped fetching for good, if any."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Others may still wake a closed fetcher, as when they release its images, and the number may be another file's.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._watched: dict[int, Any] = {}
        """The multi handle of each socket."""
        self._timers: dict[Any, float] = {}
        """The time at which each multi handle with a timer is due."""
        self._multis = [pycurl.CurlMulti() for _ in range(_MULTIS)]
        for multi in self._multis:
            # As many connections stay open as one host may have.
            kept = min(hosts.at_once, options.connections) + options.connections // _MULTIS
            multi.setopt(pycurl.M_MAXCONNECTS, kept)
            multi.setopt(pycurl.M_SOCKETFUNCTION, partial(self._watch, multi))
            multi.setopt(pycurl.M_TIMERFUNCTION, partial(self._set_timer, multi))
        self._ticked_at = 0.0
        self._paused: deque[Slot] = deque()
        allowed = [ip_network(network) for network in options.allow_networks]
        self._new_slot = partial(Slot, options, allowed, buffer, self._paused)
        self._active: dict[Any, Slot] = {}
        """The slot of each libcurl handle in use."""
        self._thread = threading.Thread(target=self._run, name="sdp-fetch", daemon=True)
        self._thread.start()

    # --- called by other threads ---

    def submit(self, urls: Iterable[tuple[Token, Url]]) -> None:
        self._incoming.extend(Request(token, url) for token, url in urls)
        self.wake()

    def wait_for_room(self, timeout_s: float | None = None) -> bool:
        """Wait until there are fewer requests to start than free connections; return whether that happened in time."""
        with self._has_room:
            return self._has_room.wait_for(self._is_short_of_requests, timeout_s)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # awake already
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Stop, and drop the requests under way."""
        self._closing = True
        self.wake()
        self._thread.join(_JOIN_S)

    # --- run by the fetcher's own thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        except BaseException as error:  # noqa: BLE001 (kept for the threads that wait for results)
            self.error = error
        finally:
            for curl in self._active:
                curl.close()  # which takes it out of the multi handle, too
            for multi in self._multis:
                multi.close()
            self._epoll.close()

    def _step(self) -> None:
        now = time.monotonic()
        self._queue_new(now)
        self._start(now)
        for fd, events in self._epoll.poll(self._until_next_timer_s(now)):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            mask = pycurl.CSELECT_OUT if events & select.EPOLLOUT else 0
            if events & ~select.EPOLLOUT:
                mask |= pycurl.CSELECT_IN
            if fd in self._watched:  # by now: handling another event may have closed it
                self._handle_event(self._watched[fd], fd, mask)
        now = time.monotonic()
        for multi in [multi for multi, at in self._timers.items() if at <= now]:
            del self._timers[multi]
            self._handle_event(multi, pycurl.SOCKET_TIMEOUT, 0)
        self._resume()
        self._collect()
        if now - self._ticked_at >= _TICK_S:
            self._ticked_at = now
            self._expire(now)

    def _handle_event(self, multi: Any, fd: int, events: int) -> None:
        """Have libcurl handle an event of a socket or a timer."""
        try:
            multi.socket_action(fd, events)
        except pycurl.error as error:
            # The handle as a whole has failed: it accepts new transfers only once all others are removed.
            for slot in [slot for slot in self._active.values() if slot.multi is multi]:
                self._settle(slot, transfer.of_multi(error))

    def _until_next_timer_s(self, now: float) -> float:
        """Return the seconds until the next timer, or until the next tick, which is early enough for retries."""
        if self._incoming:
            return 0.0
        times = [now + _TICK_S, *self._timers.values(), self._turnstile.next_at()]
        return max(0.0, min(at for at in times if at is not None) - now)

    def _watch(self, multi: Any, action: int, fd: int, *_: object) -> None:
        """Watch a socket for the events that libcurl wants to know of, or stop watching it."""
        if action == pycurl.POLL_REMOVE:
            self._watched.pop(fd, None)
            with contextlib.suppress(OSError):  # closed already, and so unregistered
                self._epoll.unregister(fd)
            return
        reading, writing = action & pycurl.POLL_IN, action & pycurl.POLL_OUT
        events = (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if writing else 0)
        self._watched[fd] = multi
        try:
            self._epoll.modify(fd, events)
        except FileNotFoundError:
            self._epoll.register(fd, events)

    def _set_timer(self, multi: Any, timeout_ms: int) -> None:
        self._timers.pop(multi, None)
        if timeout_ms >= 0:
            self._timers[multi] = time.monotonic() + timeout_ms / 1000

    def _queue_new(self, now: float) -> None:
        """Queue the submitted requests and the retries that are due, as many as a short time allows.

        A site's robots.txt may take milliseconds for each URL, and meanwhile no transfer makes progress.
        """
        for gate in self._gates:
            gate.step(self._turnstile, now, self.wake)
        until = time.monotonic() + _QUEUE_S
        while self._incoming and time.monotonic() < until:
            self._queue(self._incoming.popleft(), now)
        while self._retries and self._retries[0][0] <= now and time.monotonic() < until:
            self._queue(heapq.heappop(self._retries)[2], now, first=True)

    def _queue(self, request: Request[Token], now: float, *, first: bool = False) -> None:
        if self._robots is not None and not request.robots_of and not self._allowed(self._robots, request, now):
            return
        closed = self._closed_hosts.get(request.host)
        if closed is not None and now < closed[0]:
            self._fail_for_closed_host(request, closed[1])
            return
        self._closed_hosts.pop(request.host, None)
        self._turnstile.push(request.host, request, first=first)

    def _allowed(self, robots: Robots, request: Request[Token], now: float) -> bool:
        """Return whether the site allows a request; while its robots.txt is fetched, the request waits."""
        site = site_of(request.url.text)
        if site in self._awaiting_robots:
            self._awaiting_robots[site].append(request)
        elif not robots.knows(site, now):
            self._awaiting_robots[site] = [request]
            self._queue(Request(request.token, parse(f"{site}/robots.txt"), robots_of=site), now, first=True)
        elif (refusal := robots.refusal(site, request.url.text)) is not None:
            self._fail(request, refusal)
        else:
            return True
        return False

    def _note_robots(self, site: str, text: bytes, failure: Failure | None) -> None:
        assert self._robots is not None
        now = time.monotonic()
        self._robots.note(site, text, failure, now)
        self._incoming.extendleft(reversed(self._awaiting_robots.pop(site)))

    def _start(self, now: float) -> None:
        while self._free and not self._paused and not self._buffer.full:
            if (next_up := self._turnstile.take(now)) is None:
                break
            host, request = next_up
            slot = self._new_slot(self._multis[hash(host) % _MULTIS], request, now)
            self._active[slot.curl] = slot
            try:
                slot.begin()
            except pycurl.error as error:
                self._settle(slot, transfer.of_multi(error))
        if self._is_short_of_requests():
            with self._has_room:
                self._has_room.notify_all()

    @property
    def _free(self) -> int:
        """The number of connections without a request."""
        return self._fetch.connections - len(self._active)

    def _is_short_of_requests(self) -> bool:
        return not self._incoming and self._turnstile.runnable < max(1, self._free)

    def _resume(self) -> None:
        """Continue transfers that wait for memory, in order. If all wait, the first may exceed the limit."""
        while self._paused:
            slot = self._paused[0]
            # None can become free if all memory in use belongs to transfers that wait for more.
            slot.unbound = self._buffer.used == sum(slot.reserved for slot in self._paused)
            if not slot.reserve():
                break
            self._paused.popleft()
            try:
                slot.resume(time.monotonic())
            except pycurl.error as error:  # the data that libcurl held back ended the transfer
                self._settle(slot, slot.failure(*error.args))

    def _collect(self) -> None:
        """Settle the transfers that libcurl has finished."""
        for multi in self._multis:
            more = 1
            while more:
                more, done, failed = multi.info_read()
                for curl in done:
                    self._settle(self._active[curl], None)
                for curl, code, message in failed:
                    self._settle(self._active[curl], self._active[curl].failure(code, message))

    def _expire(self, now: float) -> None:
        for slot in list(self._active.values()):
            failure = None if slot.paused_at else slot.overdue(now)
            if failure is not None:
                self._settle(slot, failure)
            elif self._paused and not slot.paused_at:
                slot.trim(now)

    def _settle(self, slot: Slot, failure: Failure | None) -> None:
        """End a request: deliver its image, follow its redirect, retry it or record its failure."""
        now = time.monotonic()
        request: Request[Token] = slot.request
        del self._active[slot.curl]
        if slot.paused_at:
            self._paused.remove(slot)
        request.seconds += slot.active_s(now)
        request.attempts += 0 if request.following else 1
        request.following = False
        failure = failure or slot.verdict()
        with contextlib.suppress(pycurl.error):  # never added
            slot.multi.remove_handle(slot.curl)  # some versions of pycurl keep a handle that is only closed
        slot.curl.close()
        host, status = request.host, slot.status
        self._turnstile.done(host, served=bool(status) and status not in transfer.THROTTLING_STATUSES)
        if not (failure and (failure.unreachable or failure.silent)):
            self._strikes.pop(host, None)
            self._served_at[host] = now
        is_redirect = status in transfer.REDIRECT_STATUSES
        kept = 0 if failure or is_redirect or request.robots_of else slot.size  # an image's last user releases it
        self._buffer.release(slot.reserved - kept)
        if failure is not None:
            self._retry_or_fail(request, failure, status, now)
        elif is_redirect:
            self._follow(request, slot.location, now)
        elif request.robots_of:
            self._note_robots(request.robots_of, b"".join(slot.pieces), None)
        else:
            request.body, request.size, request.failure = slot.pieces, slot.size, None
            self._deliver(request)

    def _follow(self, request: Request[Token], location: str, now: float) -> None:
        if request.hops >= _MOST_REDIRECTS:
            self._fail(request, Failure("redirects", f"more than {_MOST_REDIRECTS}"))
            return
        try:
            url = redirected(request.url, location)
        except BadUrl as error:
            self._fail(request, Failure("redirects", str(error)))
            return
        if (reason := self._block_reason(url)) is not None:
            self._fail(request, Failure(reason, f"redirect to {url.text}", FILTERED))
            return
        request.url = url
        request.hops += 1
        request.following = True
        self._queue(request, now, first=True)

    def _retry_or_fail(self, request: Request[Token], failure: Failure, status: int, now: float) -> None:
        """Retry a request if that may help and there is time; otherwise record its failure."""
        host = request.host
        # If the host serves other images meanwhile, it is alive, and only this one stalls.
        is_alive = now - self._served_at.get(host, -math.inf) < _SERVES_S
        if failure.unreachable or (failure.silent and not is_alive):
            self._strikes[host] = self._strikes.get(host, 0) + 1
            if self._strikes[host] >= GIVE_UP_AFTER:
                del self._strikes[host]
                self._close_host(host, now, f"given up after failures in a row, the last: {failure.detail}")
        if failure.reason == "http_status" and status in transfer.THROTTLING_STATUSES:
            wait = failure.retry_after
            if wait is not None and wait > LONGEST_WAIT_S:
                self._close_host(host, now, f"it answered {failure.detail}", min(wait, _CLOSED_HOST_S * 12))
            else:
                self._turnstile.throttle(host, now, wait)
        pause = backoff(max(0, request.attempts - 1), _FIRST_PAUSE_S, _LONGEST_PAUSE_S, spread=True)
        pause = max(pause, failure.retry_after or 0.0)
        too_late = pause > LONGEST_WAIT_S or request.seconds >= self._fetch.timeout_s
        if too_late or not failure.retry or request.attempts > self._fetch.retries:
            self._fail(request, failure)
        else:
            request.failure = failure
            heapq.heappush(self._retries, (now + pause, next(self._serial), request))

    def _close_host(self, host: str, now: float, cause: str, for_s: float = _CLOSED_HOST_S) -> None:
        """Send a host no requests for a while. Those that wait for it fail at once; a later run can retry them."""
        failure = Failure("not_asked", f"{host} is left alone for {for_s:.0f} s: {cause}")
        self._closed_hosts[host] = (now + for_s, failure)
        for request in self._turnstile.drain(host):
            self._fail_for_closed_host(request, failure)

    def _fail_for_closed_host(self, request: Request[Token], closed: Failure) -> None:
        """Fail a request to a closed host, with the failure of its last attempt if it had one."""
        if (last := request.failure) is not None:
            closed = Failure(last.reason, f"{last.detail}; not asked again: {closed.detail}")
        self._fail(request, closed)

    def _fail(self, request: Request[Token], failure: Failure) -> None:
        if request.robots_of:
            self._note_robots(request.robots_of, b"", failure)
            return
        request.failure = failure
        self._deliver(request)
