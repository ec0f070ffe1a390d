"""All requests of one worker: libcurl's multi interface, driven by epoll, in one thread.

A request waits in the turnstile for its host's turn and gets one of a fixed number of handles. What ends badly but may
pass comes back after a pause. Redirects are followed here, one request each, so that every hop is treated like the
first.
"""

import contextlib
import heapq
import itertools
import math
import os
import queue
import random
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import certifi
import pycurl

from sdp.datasets.outcomes import FILTERED
from sdp.download import transfer
from sdp.download.addresses import Networks
from sdp.download.memory import Buffer
from sdp.download.politeness import Answer, Ask, Gate, SharedGate, Turnstile
from sdp.download.robots import opt_out
from sdp.download.transfer import Failure
from sdp.urls import BadUrl, Url, redirected

Token = TypeVar("Token")

_EXPECTED_BYTES = 1 << 20
"""Reserved for a body whose length the server does not tell."""
_ERROR_BODY = 64 << 10
"""A longer page that comes with an error is not read to its end: a new connection is cheaper."""
_TICK_S = 0.1
_HEARTBEAT_S = 5.0
"""The longest silence towards shared budgets, which forget a worker after half a minute."""
_SERVES_S = 60.0
"""After an answer a host is not taken for dead, whatever else stalls, for so long."""
_SERVED_HOSTS = 10_000
_CLOSED_HOST_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_JOIN_S = 30.0
_HEADERS = ("Accept: image/jpeg,image/png,image/webp;q=0.9,image/*;q=0.8,*/*;q=0.5", "Accept-Encoding: identity")
"""An encoding that a server chooses by itself is undone by the decoders: libcurl holds megabytes of a paused bomb."""
_RECEIVE_BYTES = 64 << 10
"""What libcurl reads at once, and so the most that it holds of a transfer that is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How images are fetched; see the configuration for what each is for."""

    connections: int = 256
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 10.0
    timeout_s: float = 60.0
    retries: int = 2
    longest_wait_s: float = 60.0
    give_up_host_after: int = 20
    max_bytes: int = 50_000_000
    max_redirects: int = 5
    user_agent: str = "sdp"
    agent_token: str = "sdp"
    respect_opt_out: bool = True
    allow_networks: tuple[str, ...] = ()
    use_proxy: bool = False
    verify_tls: bool = True
    ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class Fetched(Generic[Token]):
    """How the fetching of one image ended."""

    token: Token
    body: Sequence[bytes] | None
    """In the pieces in which it came; None where it failed."""
    size: int
    """In bytes, to be given back to the buffer when the body is done with."""
    failure: Failure | None
    attempts: int
    host: str
    seconds: float
    """Spent on requests, pauses in between not counted."""


@dataclass(slots=True)
class _Job(Generic[Token]):
    token: Token
    url: Url
    hops: int = 0
    attempts: int = 0
    spent_s: float = 0.0
    following: bool = False
    """On its way after a redirect, which is no new attempt."""
    failure: Failure | None = None
    """How the last attempt ended."""


class Fetcher(Generic[Token]):
    """Fetches what is submitted and delivers each result once, from its own thread."""

    def __init__(
        self,
        options: FetchOptions,
        gate: Gate,
        buffer: Buffer,
        deliver: Callable[[Fetched[Token]], None],
        courier: "Courier | None" = None,
    ) -> None:
        """With a shared gate, `courier` carries its messages to the budgets and back."""
        self._options, self._gate, self._deliver, self._courier = options, gate, deliver, courier
        self._buffer = buffer
        self._buffer.on_release = self.wake
        if courier is not None:
            courier.on_answer = self.wake
        self._networks = Networks(options.allow_networks)
        self._turnstile: Turnstile[_Job[Token]] = Turnstile(gate)
        self._incoming: deque[_Job[Token]] = deque()
        self._later: list[tuple[float, int, _Job[Token]]] = []
        self._serial = itertools.count()
        self._strikes: dict[str, int] = defaultdict(int)
        self._served: dict[str, float] = {}
        """When each of the hosts that answered last has done so; the latest at the end."""
        self._closed: dict[str, tuple[float, Failure]] = {}
        self._hungry = threading.Condition()
        self._closing = False
        self.error: BaseException | None = None
        """Why fetching has stopped for good, if it has."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="sdp-fetch", daemon=True)
        self._thread.start()

    # For other threads.

    def submit(self, urls: Iterable[tuple[Token, Url]]) -> None:
        self._incoming.extend(_Job(token, url) for token, url in urls)
        self.wake()

    def wait_until_hungry(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Until there is less to do than connections to do it with."""
        with self._hungry:
            while not (self._is_hungry() or self._closing or self.error or stop()):
                self._hungry.wait(_TICK_S)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # awake already, or closed
            os.eventfd_write(self._wake_fd, 1)

    @property
    def active(self) -> int:
        """Requests under way."""
        return len(self._active)

    def close(self) -> None:
        """Stop; what is under way is dropped."""
        self._closing = True
        self.wake()
        self._thread.join(_JOIN_S)
        os.close(self._wake_fd)

    # The thread.

    def _run(self) -> None:
        try:
            self._open()
            while not self._closing:
                self._step()
        except BaseException as error:  # noqa: BLE001 (kept for the threads that wait for results)
            self.error = error
        finally:
            self._shut()
            with self._hungry:
                self._hungry.notify_all()

    def _open(self) -> None:
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, self._options.connections + 16)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._timer_at: float | None = None
        self._ticked_at = 0.0
        self._paused: deque[_Slot] = deque()
        self._slots = [
            _Slot(self._options, self._networks, self._buffer, self._paused) for _ in range(self._options.connections)
        ]
        self._free = list(self._slots)
        self._active: dict[Any, _Slot] = {}

    def _step(self) -> None:
        now = time.monotonic()
        self._take_in(now)
        self._start(now)
        for fd, events in self._epoll.poll(self._patience(now)):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            mask = (pycurl.CSELECT_IN if events & ~select.EPOLLOUT else 0) | (
                pycurl.CSELECT_OUT if events & select.EPOLLOUT else 0
            )
            self._act(fd, mask)
        now = time.monotonic()
        if self._timer_at is not None and now >= self._timer_at:
            self._timer_at = None
            self._act(pycurl.SOCKET_TIMEOUT, 0)
        self._resume()
        self._collect()
        if now - self._ticked_at >= _TICK_S:
            self._ticked_at = now
            self._expire(now)

    def _act(self, fd: int, events: int) -> None:
        """Let libcurl move its transfers."""
        try:
            self._multi.socket_action(fd, events)
        except pycurl.error as error:
            # No transfer's own failure: libcurl takes new transfers again only when those under way are gone.
            for slot in list(self._active.values()):
                self._settle(slot, transfer.of_multi(error))

    def _patience(self, now: float) -> float:
        """How long nothing can happen by itself."""
        ends = [now + _TICK_S, self._timer_at, self._turnstile.next_at(), self._later[0][0] if self._later else None]
        return max(0.0, min(end for end in ends if end is not None) - now)

    def _watch(self, what: int, fd: int, *_: object) -> None:
        if what == pycurl.POLL_REMOVE:
            with contextlib.suppress(OSError):  # closed already, and so unregistered
                self._epoll.unregister(fd)
            return
        events = (select.EPOLLIN if what & pycurl.POLL_IN else 0) | (select.EPOLLOUT if what & pycurl.POLL_OUT else 0)
        try:
            self._epoll.modify(fd, events)
        except FileNotFoundError:
            self._epoll.register(fd, events)

    def _set_timer(self, timeout_ms: int) -> None:
        self._timer_at = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000

    def _take_in(self, now: float) -> None:
        if self._courier is not None:
            self._correspond(self._courier, now)
        while self._incoming:
            self._queue(self._incoming.popleft(), now)
        while self._later and self._later[0][0] <= now:
            self._queue(heapq.heappop(self._later)[2], now, first=True)

    def _correspond(self, courier: "Courier", now: float) -> None:
        """Hear what the shared budgets have answered, and ask again when it is time to."""
        gate = self._gate
        assert isinstance(gate, SharedGate)
        for ask, answer in courier.answers():
            self._turnstile.unpark_later(gate.take(ask, answer), now)
        if courier.ready(now) and (gate.has_news or gate.is_waiting or courier.silent_s(now) > _HEARTBEAT_S):
            courier.send(gate.ask(self._turnstile.queued()), now)

    def _queue(self, job: _Job[Token], now: float, *, first: bool = False) -> None:
        closed = self._closed.get(job.url.host)
        if closed is not None:
            until, failure = closed
            if now < until:
                self._leave(job, failure)
                return
            del self._closed[job.url.host]
        self._turnstile.push(job.url.host, job, first=first)

    def _start(self, now: float) -> None:
        while self._free and not self._paused and not self._buffer.full:
            taken = self._turnstile.take(now)
            if taken is None:
                break
            slot = self._free.pop()
            self._active[slot.curl] = slot
            try:
                slot.begin(taken[1], now)
                self._multi.add_handle(slot.curl)
            except pycurl.error as error:
                self._settle(slot, transfer.of_multi(error))
        if self._is_hungry():
            with self._hungry:
                self._hungry.notify_all()

    def _is_hungry(self) -> bool:
        return not self._incoming and self._turnstile.runnable < max(1, len(getattr(self, "_free", ())))

    def _resume(self) -> None:
        """Let transfers go on that wait for memory, first come first served; one of them may always go on."""
        while self._paused:
            slot = self._paused[0]
            slot.unbound = self._all_wait()
            if not slot.reserve():
                break
            self._paused.popleft()
            try:
                slot.resume(time.monotonic())
            except pycurl.error as error:  # what libcurl held back ended the transfer
                self._settle(slot, slot.failure(*error.args))

    def _all_wait(self) -> bool:
        """Whether nothing will be given back by itself: all that is taken belongs to transfers that wait for more."""
        return self._buffer.used == sum(slot.reserved for slot in self._paused)

    def _collect(self) -> None:
        """Settle what libcurl has finished."""
        more = 1
        while more:
            more, done, failed = self._multi.info_read()
            for curl in done:
                self._settle(self._active[curl], None)
            for curl, code, message in failed:
                self._settle(self._active[curl], self._active[curl].failure(code, message))

    def _expire(self, now: float) -> None:
        for slot in list(self._active.values()):
            failure = None if slot.paused_at else slot.overdue(now)
            if failure is not None:
                self._settle(slot, failure)

    def _settle(self, slot: "_Slot", failure: Failure | None) -> None:
        """A request is over: deliver, follow, try again or give up."""
        now = time.monotonic()
        job: _Job[Token] = slot.job
        del self._active[slot.curl]
        try:
            self._multi.remove_handle(slot.curl)
        except pycurl.error:  # never added, or no longer usable
            slot.curl.close()
            slot.open()
        if slot.paused_at:
            self._paused.remove(slot)
        job.spent_s += slot.active_s(now)
        job.attempts += 0 if job.following else 1
        job.following = False
        failure = failure or slot.verdict()
        host, body, size, reserved = job.url.host, slot.pieces, slot.size, slot.reserved
        location, status = slot.location, slot.status
        slot.end()
        self._free.append(slot)
        self._turnstile.done(host, served=bool(status) and status not in transfer.THROTTLING_STATUSES)
        if not (failure and (failure.unreachable or failure.silent)):
            self._strikes.pop(host, None)
            self._note_served(host, now)
        if failure is None and status in transfer.REDIRECT_STATUSES:
            self._buffer.release(reserved)
            self._follow(job, location, now)
        elif failure is None:
            self._buffer.release(reserved - size)
            self._deliver(Fetched(job.token, body, size, None, job.attempts, host, job.spent_s))
        else:
            self._buffer.release(reserved)
            self._reconsider(job, failure, status, now)

    def _follow(self, job: _Job[Token], location: str, now: float) -> None:
        if job.hops >= self._options.max_redirects:
            self._fail(job, Failure("redirects", f"more than {self._options.max_redirects}"))
            return
        try:
            job.url = redirected(job.url, location)
        except BadUrl as error:
            self._fail(job, Failure("redirects", str(error)))
            return
        job.hops += 1
        job.following = True
        self._queue(job, now, first=True)

    def _reconsider(self, job: _Job[Token], failure: Failure, status: int, now: float) -> None:
        """Another try, if that may help and there is time; otherwise it has failed."""
        host = job.url.host
        # A host that serves others meanwhile is there: it is these images that stall.
        serves = now - self._served.get(host, -math.inf) < _SERVES_S
        if failure.unreachable or (failure.silent and not serves):
            self._strikes[host] += 1
            if self._strikes[host] >= self._options.give_up_host_after:
                del self._strikes[host]
                self._close_host(host, now, f"given up after failures in a row, the last: {failure.detail}")
        if failure.reason == "http_status" and status in transfer.THROTTLING_STATUSES:
            wait = failure.retry_after
            if wait is not None and wait > self._options.longest_wait_s:
                self._close_host(host, now, f"it answered {failure.detail}", min(wait, _CLOSED_HOST_S * 12))
            else:
                self._turnstile.throttle(host, now, wait)
        pause = pause_s(job.attempts, failure.retry_after)
        hopeless = (
            not failure.retry
            or job.attempts > self._options.retries
            or pause > self._options.longest_wait_s
            or job.spent_s >= self._options.timeout_s
        )
        if hopeless:
            self._fail(job, failure)
        else:
            job.failure = failure
            heapq.heappush(self._later, (now + pause, next(self._serial), job))

    def _note_served(self, host: str, now: float) -> None:
        self._served.pop(host, None)
        self._served[host] = now
        if len(self._served) > _SERVED_HOSTS:
            del self._served[next(iter(self._served))]

    def _close_host(self, host: str, now: float, why: str, for_s: float = _CLOSED_HOST_S) -> None:
        """Ask a host no more for a while: what waits for it fails at once, and can be retried later."""
        failure = Failure("not_asked", f"{host} is left alone for {for_s:.0f} s: {why}")
        self._closed[host] = (now + for_s, failure)
        for job in self._turnstile.drain(host):
            self._leave(job, failure)

    def _leave(self, job: _Job[Token], closed: Failure) -> None:
        """An image of a host that is left alone. Of one that was asked for it tells how that ended."""
        last = job.failure
        if last is not None:
            closed = Failure(last.reason, f"{last.detail}; not asked again: {closed.detail}")
        self._fail(job, closed)

    def _fail(self, job: _Job[Token], failure: Failure) -> None:
        self._deliver(Fetched(job.token, None, 0, failure, job.attempts, job.url.host, job.spent_s))

    def _shut(self) -> None:
        for slot in getattr(self, "_slots", ()):
            slot.curl.close()  # which takes it out of the multi handle, too
        if hasattr(self, "_multi"):
            self._multi.close()
            self._epoll.close()


class Courier:
    """Carries the messages of a shared gate in a thread of its own, one at a time."""

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
        """Seconds since the last message."""
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


def pause_s(attempts: int, retry_after: float | None) -> float:
    """Seconds before the next try: doubling, at random between half and all of it; not before the server's wish."""
    pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** max(0, attempts - 1)) * random.uniform(0.5, 1.0)
    return max(pause, retry_after or 0.0)


@dataclass(slots=True, eq=False)
class _Slot:
    """A libcurl handle and the request that it is busy with."""

    options: FetchOptions
    networks: Networks
    buffer: Buffer
    waiting: "deque[_Slot]"
    """Where those that wait for memory line up."""
    curl: Any = field(init=False)
    job: Any = None
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    reserved: int = 0
    unbound: bool = False
    """Whether it may go beyond the buffer's limit, as one transfer may when all wait."""
    status: int = 0
    length: int | None = None
    location: str = ""
    retry_after: float | None = None
    opted_out: str | None = None
    refused: str | None = None
    too_big: bool = False
    cut_short: bool = False
    moved_at: float = 0.0
    """When the last line of the head or piece of the body came."""
    paused_at: float = 0.0
    paused_s: float = 0.0
    began_at: float = 0.0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Make a handle."""
        options = self.options
        curl = self.curl = pycurl.Curl()
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.WRITEFUNCTION, self.write)
        curl.setopt(pycurl.HEADERFUNCTION, self.header)
        curl.setopt(pycurl.USERAGENT, options.user_agent)
        curl.setopt(pycurl.HTTPHEADER, list(_HEADERS))
        curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, round(options.connect_timeout_s * 1000)))
        curl.setopt(pycurl.DNS_CACHE_TIMEOUT, 600)
        curl.setopt(pycurl.BUFFERSIZE, _RECEIVE_BYTES)
        curl.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        curl.setopt(pycurl.MAXFILESIZE_LARGE, options.max_bytes)
        curl.setopt(pycurl.FOLLOWLOCATION, 0)
        if not options.use_proxy:
            curl.setopt(pycurl.PROXY, "")
            # With a proxy it is the proxy that is connected to, and that decides over addresses.
            curl.setopt(pycurl.OPENSOCKETFUNCTION, self.open_socket)
        curl.setopt(pycurl.CAINFO, os.fsencode(options.ca_file or certifi.where()))
        if not options.verify_tls:
            curl.setopt(pycurl.SSL_VERIFYPEER, 0)
            curl.setopt(pycurl.SSL_VERIFYHOST, 0)

    def begin(self, job: Any, now: float) -> None:
        self.job, self.began_at, self.moved_at = job, now, now
        self.curl.setopt(pycurl.URL, job.url.text)

    def end(self) -> None:
        """Be ready for the next request."""
        self.job = None
        self.pieces, self.size, self.reserved = [], 0, 0
        self.status, self.length, self.location, self.retry_after = 0, None, "", None
        self.opted_out = self.refused = None
        self.unbound = self.too_big = self.cut_short = False
        self.paused_at = self.paused_s = 0.0

    def active_s(self, now: float) -> float:
        paused = self.paused_s + (now - self.paused_at if self.paused_at else 0.0)
        return max(0.0, now - self.began_at - paused)

    def overdue(self, now: float) -> Failure | None:
        """Why the request has lasted long enough, if it has. Making the connection has libcurl's deadline."""
        options, active = self.options, self.active_s(now)
        left = options.timeout_s - self.job.spent_s
        if active <= left and now - self.moved_at <= options.first_byte_timeout_s:
            return None
        asked = self.curl.getinfo(pycurl.PRETRANSFER_TIME)
        if active > left and not asked:
            return Failure("connect", f"not connected after {active:.1f} s", retry=True)
        if active > left:
            return Failure("timeout", f"not whole after {options.timeout_s:g} s, {self.size} bytes", retry=True)
        if not asked or now - max(self.moved_at, self.began_at + asked) <= options.first_byte_timeout_s:
            return None
        what = f"silent after {self.size} bytes" if self.moved_at > self.began_at else "no answer"
        return Failure("timeout", f"{what} for {options.first_byte_timeout_s:g} s", retry=True)

    def failure(self, code: int, message: str) -> Failure | None:
        """What libcurl calls an error; None where it was ourselves who ended it."""
        if self.refused is not None and code == pycurl.E_COULDNT_CONNECT:
            return Failure("private_address", self.refused)
        if self.opted_out or self.too_big or self.cut_short:
            return None
        if self.status >= 300 and code in (pycurl.E_FILESIZE_EXCEEDED, pycurl.E_PARTIAL_FILE, pycurl.E_RECV_ERROR):
            return None
        return transfer.of_curl(code, message, connected=self.curl.getinfo(pycurl.PRETRANSFER_TIME) > 0)

    def verdict(self) -> Failure | None:
        """What a completed answer means; None for an image, or a redirect."""
        if self.status in transfer.REDIRECT_STATUSES:
            return None if self.location else Failure("redirects", f"{self.status} without a Location")
        if self.status != 200:
            return transfer.of_status(self.status, self.retry_after)
        if self.opted_out:
            return Failure("opt_out", f"X-Robots-Tag: {self.opted_out}", FILTERED)
        if self.too_big:
            return Failure("too_big", f"more than {self.options.max_bytes} bytes")
        return None if self.size else Failure("empty", "0 bytes")

    def reserve(self) -> bool:
        """Take room for as many bytes as are announced, or else for twice as many as there was room for.

        What may still grow leaves room for the one transfer that goes on when all wait, so that the limit holds.
        """
        most = self.options.max_bytes
        announced = self.length is not None and not self.reserved
        wanted = most if self.unbound else max(1, self.length or self.reserved or _EXPECTED_BYTES)
        wanted = min(wanted, most - self.reserved)
        if not self.buffer.reserve(wanted, spare=0 if announced else most, beyond_limit=self.unbound):
            return False
        self.reserved += wanted
        return True

    def resume(self, now: float) -> None:
        self.paused_s += now - self.paused_at
        self.paused_at, self.moved_at = 0.0, now
        self.curl.unpause()

    # What libcurl calls.

    def open_socket(self, purpose: int, address: Any) -> Any:  # noqa: ARG002 (pycurl's signature)
        ip = str(address.addr[0])
        if self.networks.refuses(ip):
            self.refused = ip
            return pycurl.SOCKET_BAD
        try:
            return socket.socket(address.family, address.socktype, address.protocol)
        except OSError:  # no IPv6 here, or too many open files: libcurl reports that it could not connect
            return pycurl.SOCKET_BAD

    def header(self, line: bytes) -> None:
        self.moved_at = time.monotonic()
        if line.startswith(b"HTTP/"):
            code = line.split(None, 2)[1:2]
            self.status = int(code[0]) if code and code[0].isdigit() else 0
            self.length, self.location, self.retry_after, self.opted_out = None, "", None, None
            return
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"content-length":
            self.length = min(int(value[:20]), self.options.max_bytes) if value.strip().isdigit() else None
        elif name == b"location":
            self.location = value.strip().decode("utf-8", "replace")
        elif name == b"retry-after":
            self.retry_after = transfer.retry_after_s(value.decode("latin-1"))
        elif name == b"x-robots-tag" and self.options.respect_opt_out and self.status == 200:
            # Of a redirect or an error page it says nothing about the image.
            self.opted_out = self.opted_out or opt_out(value.decode("latin-1"), self.options.agent_token)

    def write(self, piece: bytes) -> int | None:
        self.moved_at = time.monotonic()
        if self.opted_out:
            return 0
        if self.status != 200:
            self.size += len(piece)
            self.cut_short = self.size > _ERROR_BODY
            return 0 if self.cut_short else None
        size = self.size + len(piece)
        if size > self.options.max_bytes:
            self.too_big = True
            return 0
        if size > self.reserved and not ((self.unbound or not self.waiting) and self.reserve()):
            self.paused_at = time.monotonic()
            # Who has begun goes first: what is whole is soon given back.
            (self.waiting.appendleft if self.reserved else self.waiting.append)(self)
            return int(pycurl.WRITEFUNC_PAUSE)
        self.size = size
        self.pieces.append(piece)
        return None
