"""The image server's behaviours, which a URL asks for: `/images/7.jpg?do=NAME&…`.

======================= ============================================================ ================
do=                     what happens (parameter=default)                             parameters
======================= ============================================================ ================
**The image comes**
plain                   at once                                                      -
delay                   after `s` seconds                                            s=1
chunked                 in chunks, without a Content-Length, and with `bytes` zeros  size=1024 bytes=0
                        at its end
until-close             without a length; the end of the connection ends it          -
gzip                    with Content-Encoding: gzip, and rightly so                  -
early-hints             after an informational answer, 103                           -
trickle                 `bps` bytes of the body a second                             bps=1000
trickle-head            `bps` bytes of the head a second, then the body              bps=100
drop                    whole, promising keep-alive; then the connection is closed:  -
                        requests sent ahead are lost
overrun                 whole, and `bytes` more than its Content-Length says         bytes=512
wrong-type              under the content type `as`; without any if it is empty      as=text/html
robots                  with one X-Robots-Tag for each `value`                       value=noai status=200
redirect                after `hops` redirects of `status` to a Location that is     hops=1 status=302
                        `style` absolute, network (//host/…) or relative;            style=absolute
                        loop=1: to itself for ever; to=URL: there, as it stands;     loop=0 to=(none)
                        to= (empty): no Location at all
limit                   unless this host began `rps` in the last second or has       rps=10 at_once=0
                        `at_once` in flight: then 429 with Retry-After `after`;      s=0 after=1
                        each answer takes `s` seconds
**An answer without the image**
404, 429, 500, 503, …   this status; Retry-After is `after` as it stands, or, with   after=(none)
                        date=N, an HTTP date N seconds from now                      date=(none)
zero                    200 with no bytes                                            -
html                    an HTML page as an image of the right type                   -
cut-image               the first `bytes` of the image as if that were all           bytes=half
garbage                 `bytes` random bytes as an image                             bytes=10000
huge-pixels             a PNG of a few KB that says it is `width` × `height`          width=50000
                                                                                     height=50000
gzip-bomb               the image and `bytes` zeros, gzipped (1 GiB is 1 MB)         bytes=1073741824
**An answer that does not end well**
truncate                the whole length promised, `bytes` sent, closed; chunked=1:  bytes=half
                        without the last chunk                                       chunked=0
bad-chunk               a chunk whose size is no number                              -
reset                   a TCP reset after `bytes` of the body; at=head: instead of   bytes=half
                        any answer                                                   at=body
hangup                  closed without an answer, as stale keep-alive ones are       -
not-http                something that is not HTTP, closed                           -
endless                 the image, then zeros, up to 2 GiB; chunked, or `length`     length=(none)
                        is promised
endless-head            header after header, up to 64 MiB                            -
stall                   accepted, never answered                                     -
stall-head              half a head, then nothing                                    -
stall-body              a head and `bytes` of the body, then nothing                 bytes=0
======================= ============================================================ ================

Each also takes `times=N`: only the first N requests of this URL (path and query) at this host are treated so,
the image comes plainly after that; and `tag=anything`, which makes another URL of it. An unknown name or
parameter is answered with 400.

A connection that is never accepted or refused is not a matter of a URL: see `deaf_url` and `refused_url` of
`tests.misbehaving.server.ImageServer`.
"""

import asyncio
import gzip
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol
from urllib.parse import parse_qs, urlencode

from tests.misbehaving.bodies import gzip_bomb, huge_png
from tests.misbehaving.gallery import Image
from tests.misbehaving.wire import BadRequest, Request, response_head

MiB = 1 << 20


class Wire(Protocol):
    """The connection as a misbehaviour sees it."""

    async def send(self, data: bytes) -> None: ...
    def hang_up(self) -> None: ...
    def reset(self) -> None: ...


class Limiter(Protocol):
    """A host's present load, as far as the server knows it."""

    def admit(self, host: str, rps: int, at_once: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of one request, checked against those of its kind."""

    values: Mapping[str, list[str]]
    defaults: Mapping[str, str]

    def text(self, name: str) -> str:
        return self.values[name][-1] if name in self.values else self.defaults[name]

    def texts(self, name: str) -> list[str]:
        return self.values.get(name) or [self.defaults[name]]

    def count(self, name: str, least: int = 0, most: int = 1 << 60) -> int:
        text = self.text(name)
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise BadRequest(f"{name}: expected a whole number from {least} to {most}, got {text[:100]!r}")
        return int(text)

    def seconds(self, name: str) -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e6:
            raise BadRequest(f"{name}: expected a number of seconds, got {self.text(name)[:100]!r}")
        return value

    def choice(self, name: str, *choices: str) -> str:
        text = self.text(name)
        if text not in choices:
            raise BadRequest(f"{name}: expected one of {', '.join(choices)}, got {text[:100]!r}")
        return text


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request for something other than a plain answer."""

    wire: Wire
    limiter: Limiter
    request: Request
    host: str
    origin: str
    """Scheme, host and port by which the client reached us."""
    index: int
    image: Image
    name: str
    options: Options

    def head(self, status: int, *lines: str) -> bytes:
        return response_head(status, *lines, keep_alive=self.request.keep_alive)

    def image_head(self, *lines: str, length: int | None = None) -> bytes:
        """Return a head for the image, or for `length` bytes of its type."""
        length = len(self.image.data) if length is None else length
        return self.head(200, f"Content-Type: {self.image.content_type}", f"Content-Length: {length}", *lines)

    async def answer(self, head: bytes, body: bytes = b"") -> None:
        """Return the correct answer."""
        await self.wire.send(head if self.request.method == "HEAD" else head + body)

    def part(self) -> bytes:
        """Return the first `bytes` of the image."""
        data = self.image.data
        return data[: len(data) // 2 if self.options.text("bytes") == "half" else self.options.count("bytes")]


Run = Callable[[Exchange], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A misbehaviour: what it is called and what it takes."""

    name: str
    run: Run
    defaults: Mapping[str, str]


KINDS: dict[str, Kind] = {}
COMMON_PARAMETERS = ("do", "times", "tag")


def kind(name: str, **defaults: str) -> Callable[[Run], Run]:
    """Register a misbehaviour. A parameter named like a Python keyword is given with a trailing _."""

    def register(run: Run) -> Run:
        named = {key.rstrip("_"): value for key, value in defaults.items()}
        KINDS[name] = Kind(name, run, named)
        return run

    return register


@dataclass(frozen=True, slots=True)
class Plan:
    """A query that has been understood."""

    name: str
    kind: Kind
    options: Options
    times: int | None
    """Number of requests treated like this; None means all."""


def plan(query: str) -> Plan | None:
    """Parse a query; None if it asks for a plain answer. Raises BadRequest."""
    values = parse_qs(query, keep_blank_values=True)
    if "do" not in values:
        return None
    name = values["do"][-1]
    kind = KINDS.get("status" if len(name) == 3 and name.isdigit() else name)
    if kind is None:
        raise BadRequest(f"do: expected a status or one of {', '.join(KINDS)}, got {name[:100]!r}")
    unknown = set(values) - set(kind.defaults) - set(COMMON_PARAMETERS)
    if unknown:
        takes = ", ".join((*kind.defaults, *COMMON_PARAMETERS[1:]))
        raise BadRequest(f"do={name} takes {takes}; got {', '.join(sorted(unknown))[:100]!r}")
    options = Options(values, {**kind.defaults, "times": "0"})
    return Plan(name, kind, options, options.count("times") if "times" in values else None)


# The image comes.


@kind("plain")
async def _plain(x: Exchange) -> None:
    await x.answer(x.image_head(), x.image.data)


@kind("delay", s="1")
async def _delay(x: Exchange) -> None:
    await asyncio.sleep(x.options.seconds("s"))
    await x.answer(x.image_head(), x.image.data)


@kind("chunked", size="1024", bytes="0")
async def _chunked(x: Exchange) -> None:
    size, data = x.options.count("size", least=1), x.image.data
    chunks = [_chunk(data[at : at + size]) for at in range(0, len(data), size)]
    zeros = _chunk(bytes(size)) * (x.options.count("bytes", most=16 * MiB) // size)
    await x.answer(_chunked_head(x), b"".join(chunks) + zeros + _chunk(b""))


@kind("until-close")
async def _until_close(x: Exchange) -> None:
    x.wire.hang_up()
    head = response_head(200, f"Content-Type: {x.image.content_type}", keep_alive=False)
    await x.answer(head, x.image.data)


@kind("gzip")
async def _gzip(x: Exchange) -> None:
    body = gzip.compress(x.image.data, 1)
    await x.answer(x.image_head("Content-Encoding: gzip", length=len(body)), body)


@kind("early-hints")
async def _early_hints(x: Exchange) -> None:
    await x.wire.send(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n")
    await x.answer(x.image_head(), x.image.data)


@kind("trickle", bps="1000")
async def _trickle(x: Exchange) -> None:
    bps = x.options.count("bps", least=1)
    await x.wire.send(x.image_head())
    if x.request.method != "HEAD":
        await _slowly(x.wire, x.image.data, bps)


@kind("trickle-head", bps="100")
async def _trickle_head(x: Exchange) -> None:
    await _slowly(x.wire, x.image_head(), x.options.count("bps", least=1))
    await x.answer(b"", x.image.data)


@kind("drop")
async def _drop(x: Exchange) -> None:
    await x.answer(x.image_head(), x.image.data)
    x.wire.hang_up()


@kind("overrun", bytes="512")
async def _overrun(x: Exchange) -> None:
    await x.answer(x.image_head(), x.image.data + b"?" * x.options.count("bytes", most=MiB))


@kind("wrong-type", as_="text/html")
async def _wrong_type(x: Exchange) -> None:
    content_type = _one_line(x.options.text("as"))
    lines = [f"Content-Type: {content_type}"] if content_type else []
    await x.answer(x.head(200, *lines, f"Content-Length: {len(x.image.data)}"), x.image.data)


@kind("robots", value="noai", status="200")
async def _robots(x: Exchange) -> None:
    tags = [f"X-Robots-Tag: {_one_line(value)}" for value in x.options.texts("value")]
    status = int(x.options.choice("status", "200", "404", "503"))
    if status != 200:
        await x.answer(x.head(status, "Content-Length: 0", *tags))
        return
    await x.answer(x.image_head(*tags), x.image.data)


@kind("redirect", hops="1", status="302", style="absolute", loop="0", to="")
async def _redirect(x: Exchange) -> None:
    status = int(x.options.choice("status", "301", "302", "303", "307", "308"))
    style = x.options.choice("style", "absolute", "network", "relative")
    hops, loop = x.options.count("hops"), x.options.choice("loop", "0", "1") == "1"
    if "to" in x.options.values:
        to = _one_line(x.options.text("to"))
    else:
        following = {key: values[-1] for key, values in x.options.values.items()} | {"hops": str(hops - 1)}
        last = {"do": "plain"}
        to = x.request.target if loop else f"{x.request.path}?{urlencode(following if hops > 1 else last)}"
        if style != "relative":
            to = (x.origin if style == "absolute" else x.origin.partition(":")[2]) + to
    lines = [f"Location: {to}"] if to else []
    await x.answer(x.head(status, *lines, "Content-Length: 0"))


@kind("limit", rps="10", at_once="0", s="0", after="1")
async def _limit(x: Exchange) -> None:
    rps, at_once, after = x.options.count("rps"), x.options.count("at_once"), _one_line(x.options.text("after"))
    delay = x.options.seconds("s")
    if not x.limiter.admit(x.host, rps, at_once):
        await x.answer(x.head(429, f"Retry-After: {after}", "Content-Length: 0"))
        return
    await asyncio.sleep(delay)
    await x.answer(x.image_head(), x.image.data)


# An answer without the image.


@kind("status", after="", date="")
async def _status(x: Exchange) -> None:
    status = int(x.name)
    if not 200 <= status <= 599:
        raise BadRequest(f"do: expected a status from 200 to 599, got {status}")
    lines = []
    if x.options.text("date"):
        lines = [f"Retry-After: {formatdate(time.time() + x.options.count('date'), usegmt=True)}"]
    elif x.options.text("after"):
        lines = [f"Retry-After: {_one_line(x.options.text('after'))}"]
    if status in (204, 304):
        await x.answer(x.head(status, *lines))
        return
    body = f"{status}, as you asked\n".encode()
    await x.answer(x.head(status, "Content-Type: text/plain", f"Content-Length: {len(body)}", *lines), body)


@kind("zero")
async def _zero(x: Exchange) -> None:
    await x.answer(x.image_head(length=0))


@kind("html")
async def _html(x: Exchange) -> None:
    body = b"<!doctype html><title>Gone</title><p>This image has moved on.</p>\n"
    await x.answer(x.image_head(length=len(body)), body)


@kind("cut-image", bytes="half")
async def _cut_image(x: Exchange) -> None:
    body = x.part()
    await x.answer(x.image_head(length=len(body)), body)


@kind("garbage", bytes="10000")
async def _garbage(x: Exchange) -> None:
    body = _noise(x.index, x.options.count("bytes", most=64 * MiB))
    await x.answer(x.image_head(length=len(body)), body)


@kind("huge-pixels", width="50000", height="50000")
async def _huge_pixels(x: Exchange) -> None:
    body = huge_png(x.options.count("width", 1), x.options.count("height", 1))
    await x.answer(x.head(200, "Content-Type: image/png", f"Content-Length: {len(body)}"), body)


@kind("gzip-bomb", bytes=str(1 << 30))
async def _gzip_bomb(x: Exchange) -> None:
    size = x.options.count("bytes", most=4 << 30)
    body = await asyncio.to_thread(gzip_bomb, x.image.data, size)
    await x.answer(x.image_head("Content-Encoding: gzip", length=len(body)), body)


# An answer that does not end well.


@kind("truncate", bytes="half", chunked="0")
async def _truncate(x: Exchange) -> None:
    chunked = x.options.choice("chunked", "0", "1") == "1"
    part = x.part()
    await x.wire.send(_chunked_head(x) + _chunk(part) if chunked else x.image_head() + part)
    x.wire.hang_up()


@kind("bad-chunk")
async def _bad_chunk(x: Exchange) -> None:
    data = x.image.data
    await x.wire.send(_chunked_head(x) + _chunk(data[:100]) + b"lots\r\n" + data[100:])
    x.wire.hang_up()


@kind("reset", bytes="half", at="body")
async def _reset(x: Exchange) -> None:
    if x.options.choice("at", "body", "head") == "body":
        await x.wire.send(x.image_head() + x.part())
    x.wire.reset()


@kind("hangup")
async def _hangup(x: Exchange) -> None:
    x.wire.hang_up()


@kind("not-http")
async def _not_http(x: Exchange) -> None:
    await x.wire.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    x.wire.hang_up()


@kind("endless", length="")
async def _endless(x: Exchange) -> None:
    promised = x.options.count("length") if x.options.text("length") else None
    chunk = _chunk if promised is None else bytes
    head = _chunked_head(x) if promised is None else x.image_head(length=promised)
    await x.wire.send(head + chunk(x.image.data))
    zeros = chunk(bytes(MiB // 4))
    for _ in range(4 * 2048):
        await x.wire.send(zeros)
        await asyncio.sleep(0)
    x.wire.hang_up()


@kind("endless-head")
async def _endless_head(x: Exchange) -> None:
    await x.wire.send(b"HTTP/1.1 200 OK\r\n")
    for number in range(64 * MiB // 1024):
        name = f"X-Padding-{number}: ".encode()
        await x.wire.send(name.ljust(1022, b"x") + b"\r\n")
        await asyncio.sleep(0)
    x.wire.hang_up()


@kind("stall")
async def _stall(_: Exchange) -> None:
    await _hold()


@kind("stall-head")
async def _stall_head(x: Exchange) -> None:
    head = x.image_head()
    await x.wire.send(head[: len(head) // 2])
    await _hold()


@kind("stall-body", bytes="0")
async def _stall_body(x: Exchange) -> None:
    await x.wire.send(x.image_head() + x.part())
    await _hold()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunked_head(x: Exchange) -> bytes:
    return x.head(200, f"Content-Type: {x.image.content_type}", "Transfer-Encoding: chunked")


def _noise(index: int, size: int) -> bytes:
    return random.Random(index).randbytes(size)


def _one_line(text: str) -> str:
    if any(ord(letter) < 32 for letter in text):
        raise BadRequest(f"a header is one line, got {text[:100]!r}")
    return text


async def _slowly(wire: Wire, data: bytes, bps: int) -> None:
    """Send at most ten pieces a second."""
    size = max(1, bps // 10)
    for at in range(0, len(data), size):
        await wire.send(data[at : at + size])
        await asyncio.sleep(size / bps)


async def _hold() -> None:
    """Wait until the client leaves, which cancels this."""
    await asyncio.get_running_loop().create_future()
