"""The image server's behaviours, which a URL asks for: `/images/7.jpg?do=NAME&PARAMETER=VALUE`.

A behaviour is a function below, with `-` for `_`, and its parameters are those of the function; any status is one too.
Each also takes `times=N`: only the first N requests of this URL at this host are treated so, the image comes plainly
after that; and `tag=ANYTHING`, which makes another URL of it.
"""

import gzip
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from email.utils import formatdate
from http.client import responses
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlencode

from tests.misbehaving.bodies import huge_png
from tests.misbehaving.traffic import Visit

MiB = 1 << 20


class Exchange(BaseHTTPRequestHandler):
    """A connection, and the request on it that is being answered."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    server: Any
    origin: str
    """Scheme, host and port by which the client reached the server."""
    query: dict[str, list[str]]
    visit: Visit
    index: int
    """The image that is asked for, and its bytes and type."""
    image: bytes
    content_type: str

    def do_GET(self) -> None:
        self.server.site.serve(self)

    def head(self, status: int, *lines: str) -> bytes:
        """Return a status line and headers. There is no Date, which clients would compare."""
        self.visit.status = status
        return "\r\n".join((f"HTTP/1.1 {status} {responses.get(status, 'Unknown')}", *lines, "", "")).encode()

    def image_head(self, *lines: str, length: int | None = None) -> bytes:
        """Return a head for the image, or for `length` bytes of its type."""
        length = len(self.image) if length is None else length
        return self.head(200, f"Content-Type: {self.content_type}", f"Content-Length: {length}", *lines)

    def send(self, data: bytes) -> None:
        """Write, and wait until the kernel has all of it."""
        self.wfile.write(data)

    def send_text(self, status: int, text: str, *lines: str) -> None:
        """Answer with a page of plain text."""
        body = f"{text}\n".encode()
        self.send(self.head(status, "Content-Type: text/plain", f"Content-Length: {len(body)}", *lines) + body)

    def half(self) -> bytes:
        """Return the first half of the image."""
        return self.image[: len(self.image) // 2]

    def hang_up(self) -> None:
        """Close the connection after this answer."""
        self.close_connection = True

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        self.hang_up()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    def hold(self) -> None:
        """Wait until the client leaves."""
        self.hang_up()
        self.connection.recv(1)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


# The image comes.


def plain(x: Exchange) -> None:
    x.send(x.image_head() + x.image)


def delay(x: Exchange, s: str = "1") -> None:
    """Send the image after `s` seconds."""
    time.sleep(float(s))
    plain(x)


def chunked(x: Exchange, size: str = "1024", bytes: str = "0") -> None:
    """Send the image in chunks of `size`, with `bytes` zeros at its end."""
    step, data = int(size), x.image
    chunks = [_chunk(data[at : at + step]) for at in range(0, len(data), step)]
    zeros = _chunk(b"\0" * step) * (int(bytes) // step)
    x.send(_chunked_head(x) + b"".join(chunks) + zeros + _chunk(b""))


def until_close(x: Exchange) -> None:
    """Send no length: the end of the connection ends the image."""
    x.hang_up()
    x.send(x.head(200, f"Content-Type: {x.content_type}", "Connection: close") + x.image)


def gzip_(x: Exchange) -> None:
    body = gzip.compress(x.image, 1)
    x.send(x.image_head("Content-Encoding: gzip", length=len(body)) + body)


def early_hints(x: Exchange) -> None:
    """Send an informational answer first."""
    x.send(x.head(103, "Link: </style.css>; rel=preload"))
    plain(x)


def trickle(x: Exchange, bps: str = "1000") -> None:
    """Send `bps` bytes of the body a second."""
    x.send(x.image_head())
    _slowly(x, x.image, int(bps))


def trickle_head(x: Exchange, bps: str = "100") -> None:
    """Send `bps` bytes of the head a second, then the body."""
    _slowly(x, x.image_head(), int(bps))
    x.send(x.image)


def drop(x: Exchange) -> None:
    """Close the connection although HTTP/1.1 keeps it: requests that were sent ahead are lost."""
    plain(x)
    x.hang_up()


def overrun(x: Exchange, bytes: str = "512") -> None:
    """Send `bytes` more than the Content-Length says."""
    x.send(x.image_head() + x.image + b"?" * int(bytes))


def wrong_type(x: Exchange, type: str = "text/html") -> None:
    """Send another content type, or none if it is empty."""
    lines = [f"Content-Type: {type}"] if type else []
    x.send(x.head(200, *lines, f"Content-Length: {len(x.image)}") + x.image)


def robots(x: Exchange, value: str = "noai", status: str = "200") -> None:
    """Send an X-Robots-Tag for each `value`."""
    tags = [f"X-Robots-Tag: {each}" for each in x.query.get("value", [value])]
    if status == "200":
        x.send(x.image_head(*tags) + x.image)
    else:
        x.send(x.head(int(status), "Content-Length: 0", *tags))


def redirect(
    x: Exchange, hops: str = "1", status: str = "302", style: str = "absolute", loop: str = "0", to: str | None = None
) -> None:
    """Redirect `hops` times to a Location that is absolute, network (//host/…) or relative, or to `to` as it stands.

    `loop=1` redirects for ever; an empty `to` is no Location at all.
    """
    if to is None:
        following = {key: values[-1] for key, values in x.query.items()} | {"hops": str(int(hops) - 1)}
        query = urlencode(following if int(hops) > 1 else {"do": "plain"})
        target = x.path if loop == "1" else f"{x.path.partition('?')[0]}?{query}"
        to = {"absolute": x.origin, "network": x.origin.partition(":")[2], "relative": ""}[style] + target
    lines = [f"Location: {to}"] if to else []
    x.send(x.head(int(status), *lines, "Content-Length: 0"))


def limit(x: Exchange, rps: str = "10", at_once: str = "1000000", after: str = "1") -> None:
    """Send 429 if this host began `rps` in the last second or has `at_once` in flight."""
    if x.server.site.admit(x.visit, int(rps), int(at_once)):
        plain(x)
    else:
        x.send_text(429, "too many", f"Retry-After: {after}")


# An answer without the image.


def status(x: Exchange, after: str = "", date: str = "") -> None:
    """Send a status with Retry-After `after` as it stands, or, with `date=N`, an HTTP date N seconds from now."""
    if date:
        after = formatdate(time.time() + int(date), usegmt=True)
    lines, code = [f"Retry-After: {after}"] if after else [], int(x.query["do"][-1])
    if code in (204, 304):
        x.send(x.head(code, *lines))
    else:
        x.send_text(code, "as you asked", *lines)


def zero(x: Exchange) -> None:
    x.send(x.image_head(length=0))


def html(x: Exchange) -> None:
    """Send a page as an image of the right type."""
    body = b"<!doctype html><title>Gone</title><p>This image has moved on.</p>\n"
    x.send(x.image_head(length=len(body)) + body)


def cut_image(x: Exchange) -> None:
    """Send the first half as if that were all."""
    x.send(x.image_head(length=len(x.half())) + x.half())


def garbage(x: Exchange, bytes: str = "10000") -> None:
    body = random.Random(x.index).randbytes(int(bytes))
    x.send(x.image_head(length=len(body)) + body)


def huge_pixels(x: Exchange) -> None:
    """Send a PNG of a few KB that says it has 50,000 × 50,000 pixels."""
    body = huge_png(50_000, 50_000)
    x.send(x.head(200, "Content-Type: image/png", f"Content-Length: {len(body)}") + body)


# An answer that does not end well.


def truncate(x: Exchange, chunked: str = "0") -> None:
    """Promise the whole image and send half of it, or with `chunked=1` no last chunk."""
    x.send(_chunked_head(x) + _chunk(x.half()) if chunked == "1" else x.image_head() + x.half())
    x.hang_up()


def bad_chunk(x: Exchange) -> None:
    """Send a chunk whose size is no number."""
    x.send(_chunked_head(x) + _chunk(x.image[:100]) + b"lots\r\n" + x.image[100:])
    x.hang_up()


def reset(x: Exchange, at: str = "body") -> None:
    """Reset the connection within the body, or with `at=head` instead of any answer."""
    if at == "body":
        x.send(x.image_head() + x.half())
    x.reset()


def hangup(x: Exchange) -> None:
    """Close the connection without an answer, as stale ones are."""
    x.hang_up()


def not_http(x: Exchange) -> None:
    x.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    x.hang_up()


def endless(x: Exchange, length: str = "") -> None:
    """Send the image, then zeros, up to 2 GiB, in chunks or with a `length`."""
    piece = bytes if length else _chunk
    x.send(x.image_head(length=int(length)) if length else _chunked_head(x))
    x.send(piece(x.image))
    for _ in range(8192):
        x.send(piece(bytes(MiB // 4)))
    x.hang_up()


def endless_head(x: Exchange) -> None:
    """Send header after header, up to 64 MiB."""
    x.send(b"HTTP/1.1 200 OK\r\n")
    for number in range(64 * MiB // 1024):
        x.send(f"X-Padding-{number}: ".encode().ljust(1022, b"x") + b"\r\n")
    x.hang_up()


def stall(x: Exchange) -> None:
    """Never answer."""
    x.hold()


def stall_head(x: Exchange) -> None:
    x.send(x.image_head()[:40])
    x.hold()


def stall_body(x: Exchange) -> None:
    x.send(x.image_head())
    x.hold()


_RUNS = (
    plain, delay, chunked, until_close, gzip_, early_hints, trickle, trickle_head, drop, overrun, wrong_type, robots,
    redirect, limit, status, zero, html, cut_image, garbage, huge_pixels, truncate, bad_chunk, reset,
    hangup, not_http, endless, endless_head, stall, stall_head, stall_body,
)  # fmt: skip
KINDS: dict[str, Callable[..., None]] = {run.__name__.strip("_").replace("_", "-"): run for run in _RUNS}


def run(x: Exchange) -> None:
    """Do what the request's query asks for."""
    name = x.query["do"][-1]
    kind = KINDS.get("status" if name.isdigit() else name)
    if kind is None:
        x.send_text(400, f"do: expected a status or one of {', '.join(KINDS)}")
        return
    kind(x, **{key: values[-1] for key, values in x.query.items() if key not in ("do", "times", "tag")})


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunked_head(x: Exchange) -> bytes:
    return x.head(200, f"Content-Type: {x.content_type}", "Transfer-Encoding: chunked")


def _slowly(x: Exchange, data: bytes, bps: int) -> None:
    """Send at most ten pieces a second."""
    size = max(1, bps // 10)
    for at in range(0, len(data), size):
        x.send(data[at : at + size])
        time.sleep(size / bps)
