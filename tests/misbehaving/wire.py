"""HTTP/1.1 on one connection, down to its bytes: requests in, raw bytes out.

A plain answer is written from `data_received` itself, without a task, so that it is cheap. A slow one is a coroutine in
a task of its own, which ends when the client leaves or its time is over.
"""

import asyncio
import http
import logging
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol, cast

from tests.misbehaving.traffic import Traffic, Visit

MAX_HEAD = 64 * 1024
"""Bytes of one request's head."""
MAX_AHEAD = 1 << 20
"""Bytes of requests sent ahead while an earlier one is being answered; a client that sends more is cut off. (To stop
reading instead would be to miss that it leaves.)"""
TLS_PIECE = 64 * 1024

log = logging.getLogger(__name__)


class BadRequest(ValueError):
    """A request that the server does not understand; the message is for the client."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    """Path and query, as they came."""
    path: str
    query: str
    host: str
    """Host header in lower case without its port; empty if there is none."""
    user_agent: str
    keep_alive: bool
    body_length: int


def parse_head(head: str) -> Request:
    """Read a request's head, without its closing blank line."""
    first, *lines = head.split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest(f"expected a request line such as GET / HTTP/1.1, got {first[:100]!r}")
    method, target, version = parts
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadRequest(f"expected a header, got {line[:100]!r}")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > MAX_HEAD:
        raise BadRequest(f"expected a Content-Length of at most {MAX_HEAD}, got {length[:100]!r}")
    path, _, query = target.partition("?")
    connection = headers.get("connection", "").lower()
    return Request(
        method,
        target,
        path,
        query,
        _without_port(headers.get("host", "")),
        headers.get("user-agent", ""),
        connection != "close" if version == "HTTP/1.1" else connection == "keep-alive",
        int(length),
    )


def response_head(status: int, *lines: str, keep_alive: bool = True) -> bytes:
    """A status line and headers. There is no Date: an answer is made once and sent many times."""
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    connection = "keep-alive" if keep_alive else "close"
    return "\r\n".join((f"HTTP/1.1 {status} {phrase}", *lines, f"Connection: {connection}", "", "")).encode()


def response(status: int, content_type: str, body: bytes, *, keep_alive: bool = True) -> bytes:
    """A whole answer."""
    head = response_head(status, f"Content-Type: {content_type}", f"Content-Length: {len(body)}", keep_alive=keep_alive)
    return head + body


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


class Site(Protocol):
    """The handler of requests behind the connections."""

    def respond(self, connection: "Connection", request: Request) -> bytes | Coroutine[None, None, None]:
        """The answer's bytes, or the coroutine that gives it with the connection's `send`."""


class Connection(asyncio.Protocol):
    """One client's connection: takes its requests one after the other."""

    def __init__(self, site: Site, traffic: Traffic, open_connections: set["Connection"]):
        self._site = site
        self._traffic = traffic
        self._all = open_connections
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._visit: Visit | None = None
        self._answering = False
        self._unsent = False
        self._sent_out: asyncio.Future[None] | None = None
        self._end = ""
        """The end of the connection after this answer: `close`, `reset`, or empty to keep it."""

    # What a site and its misbehaviours use.

    def visited(self, request: Request) -> Visit:
        """Count this request; its end is counted by the connection."""
        host = request.host or str(self._transport.get_extra_info("sockname")[0])
        self._visit = self._traffic.begin(host, request.target, request.user_agent)
        return self._visit

    async def send(self, data: bytes) -> None:
        """Write, and wait until the kernel has all of it."""
        self._note(data)
        # Over TLS asyncio calls a write done when it is encrypted: only small ones tell when the client is slow.
        size = TLS_PIECE if self._over_tls else max(1, len(data))
        for at in range(0, len(data), size):
            self._transport.write(data[at : at + size])
            if self._unsent:
                self._sent_out = asyncio.get_running_loop().create_future()
                await self._sent_out

    def hang_up(self) -> None:
        """Close the connection after this answer, without a word."""
        self._end = self._end or "close"

    def reset(self) -> None:
        """End the connection after this answer with a TCP reset."""
        self._end = "reset"

    # What the server uses.

    def abort(self) -> None:
        """End the connection now, whatever is going on."""
        self._transport.abort()

    @property
    def idle(self) -> bool:
        return not self._answering

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._over_tls = transport.get_extra_info("ssl_object") is not None
        # Paused means: not all is with the kernel yet. Over TLS a limit of 0 pauses even when nothing is left.
        self._transport.set_write_buffer_limits(high=1 if self._over_tls else 0, low=0)
        self._traffic.opened()
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.idle:
            self._next()
        elif len(self._buffer) > MAX_AHEAD:
            self.abort()

    def pause_writing(self) -> None:
        self._unsent = True

    def resume_writing(self) -> None:
        self._unsent = False
        if self._sent_out is not None:
            if not self._sent_out.done():
                self._sent_out.set_result(None)
            self._sent_out = None
        elif self._task is None and self._answering:
            self._finish()
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        self._all.discard(self)
        if self._task is not None:
            self._task.cancel()
        self._count_end()

    # The rest is how it works.

    def _next(self) -> None:
        """Answer the requests that are here, until one takes its time."""
        while self.idle and not self._transport.is_closing():
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD:
                    self._refuse(431, f"a request's head has at most {MAX_HEAD} bytes")
                break
            try:
                request = parse_head(self._buffer[:end].decode("latin-1"))
            except BadRequest as error:
                self._refuse(400, str(error))
                break
            stop = end + 4 + request.body_length
            if len(self._buffer) < stop:
                break
            del self._buffer[:stop]
            self._answering = True
            if not request.keep_alive:
                self.hang_up()
            answer = self._site.respond(self, request)
            if isinstance(answer, bytes) and self._over_tls:
                answer = self.send(answer)
            if isinstance(answer, bytes):
                self._note(answer)
                self._transport.write(answer)
                if not self._unsent:
                    self._finish()
            else:
                self._task = asyncio.get_running_loop().create_task(self._run(answer))

    async def _run(self, answer: Coroutine[None, None, None]) -> None:
        try:
            await answer
        except BadRequest as error:
            await self.send(response(400, "text/plain", f"{error}\n".encode()))
        except Exception:
            log.exception("the image server failed to answer; its client is hung up on")
            self.hang_up()
        self._task = None
        self._finish()
        self._next()

    def _finish(self) -> None:
        self._count_end()
        self._answering = False
        if self._end == "reset":
            plug = cast(socket.socket, self._transport.get_extra_info("socket"))
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        elif self._end:
            self._transport.close()

    def _count_end(self) -> None:
        if self._visit is not None:
            self._traffic.end(self._visit)
            self._visit = None

    def _note(self, data: bytes) -> None:
        if self._visit is not None and data[:9] == b"HTTP/1.1 ":
            self._visit.status = int(data[9:12])

    def _refuse(self, status: int, why: str) -> None:
        self._transport.write(response(status, "text/plain", f"{why}\n".encode(), keep_alive=False))
        self._transport.close()
