"""Every misbehaviour of the image server, seen from a bare socket: no client library smooths anything over."""

import gzip
import io
import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.misbehaving import behaviours
from tests.misbehaving.server import ImageServer

IMAGE = b"\xff\xd8 not really a picture, but it has a beginning " + bytes(range(256)) * 40 + b" and an end \xff\xd9"
PATIENCE_S = 10.0
"""For what must come."""
QUIET_S = 0.15
"""For what must not come after what came in one piece."""


@pytest.fixture(scope="module")
def running() -> Iterator[ImageServer]:
    with ImageServer(images=100_000, distinct=1, source=lambda _: (IMAGE, "image/jpeg", "jpg")) as server:
        yield server


@pytest.fixture
def server(running: ImageServer) -> ImageServer:
    running.reset()
    return running


@dataclass(frozen=True)
class Reply:
    """All that a connection gave until it ended or fell silent."""

    raw: bytes
    end: str
    """closed, reset, or silent."""
    seconds: float

    @property
    def status(self) -> int:
        assert self.raw.startswith(b"HTTP/1.1 "), self.raw[:100]
        return int(self.raw[9:12])

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]

    def headers(self, name: str) -> list[str]:
        lines = [line.partition(b": ") for line in self.head.split(b"\r\n")[1:]]
        return [value.decode() for key, _, value in lines if key.decode().lower() == name.lower()]

    def header(self, name: str) -> str | None:
        values = self.headers(name)
        assert len(values) <= 1
        return values[0] if values else None


def connect(server: ImageServer) -> socket.socket:
    return socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S)


def request(url: str, *, last: bool = True, method: str = "GET") -> bytes:
    target = urlsplit(url)
    lines = [f"{method} {target.path}?{target.query} HTTP/1.1", f"Host: {target.netloc}"]
    return "\r\n".join([*lines, *(["Connection: close"] if last else []), "", ""]).encode()


def listen(plug: socket.socket, quiet_s: float = PATIENCE_S, at_most: int = 1 << 40) -> Reply:
    """All that comes until the end, or until nothing has come for so long after the first bytes."""
    raw = bytearray()
    began = time.monotonic()
    end = "cut off by the test"
    plug.settimeout(PATIENCE_S)
    while len(raw) < at_most:
        try:
            data = plug.recv(1 << 18)
        except TimeoutError:
            end = "silent"
            break
        except ConnectionResetError:
            end = "reset"
            break
        if not data:
            end = "closed"
            break
        raw += data
        plug.settimeout(quiet_s)
    return Reply(bytes(raw), end, time.monotonic() - began)


def ask(server: ImageServer, do: str, *, quiet_s: float = PATIENCE_S, method: str = "GET", **parameters: Any) -> Reply:
    """Send one request with `Connection: close`; return everything until the server hangs up or falls silent."""
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, do, **parameters), method=method))
        return listen(plug, quiet_s)


def unchunked(body: bytes) -> bytes:
    """Return the content of a complete chunked body."""
    data = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert rest == b"\r\n"
            return data
        data += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        body = rest[length + 2 :]


def test_plain_is_the_image(server: ImageServer) -> None:
    reply = ask(server, "plain")
    assert (reply.status, reply.body, reply.end) == (200, IMAGE, "closed")
    assert reply.header("Content-Type") == "image/jpeg"
    assert reply.header("Content-Length") == str(len(IMAGE))


@pytest.mark.parametrize("status", [403, 404, 410, 429, 500, 502, 503, 599])
def test_a_status_is_given_without_an_image(server: ImageServer, status: int) -> None:
    reply = ask(server, str(status))
    assert (reply.status, reply.end, reply.header("Content-Type")) == (status, "closed", "text/plain")
    assert reply.header("Content-Length") == str(len(reply.body))
    assert reply.header("Retry-After") is None


def test_retry_after_may_be_a_date(server: ImageServer) -> None:
    before = time.time()
    value = ask(server, "503", date=30).header("Retry-After")
    assert value is not None
    assert value.endswith(" GMT")
    assert before + 29 <= parsedate_to_datetime(value).timestamp() <= time.time() + 30


def test_only_the_first_requests_of_a_url_misbehave(server: ImageServer) -> None:
    def statuses(count: int, **parameters: Any) -> list[int]:
        return [ask(server, "500", times=2, **parameters).status for _ in range(count)]

    assert statuses(4) == [500, 500, 200, 200]
    assert statuses(3, tag="another-url") == [500, 500, 200]
    server.reset()
    assert statuses(3) == [500, 500, 200]


def test_a_stall_never_answers(server: ImageServer) -> None:
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, "stall")))
        server.wait_for(lambda stats: stats.in_flight == 1)
        plug.settimeout(QUIET_S)
        with pytest.raises(TimeoutError):
            plug.recv(1)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_stalled_body_stops_after_so_many_bytes(server: ImageServer, size: int) -> None:
    reply = ask(server, "stall-body", quiet_s=QUIET_S, bytes=size)
    assert (reply.body, reply.end) == (IMAGE[:size], "silent")
    assert reply.header("Content-Length") == str(len(IMAGE))


def test_a_delay_comes_before_the_first_byte(server: ImageServer) -> None:
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, "delay", s=0.3)))
        began = time.monotonic()
        assert plug.recv(1) == b"H"
        assert time.monotonic() - began >= 0.29
        assert listen(plug).raw.endswith(IMAGE)


def test_a_trickle_is_no_faster_than_it_should_be(server: ImageServer) -> None:
    reply = ask(server, "trickle", bps=len(IMAGE) * 4)
    assert reply.body == IMAGE
    assert reply.seconds >= 0.2
    assert sum(visit.sent for visit in server.visits()) == len(reply.raw)


def test_the_head_may_trickle_too(server: ImageServer) -> None:
    reply = ask(server, "trickle-head", bps=400)
    assert (reply.status, reply.body) == (200, IMAGE)
    assert reply.seconds >= len(reply.head) / 400 - 0.15


@pytest.mark.parametrize("size", [0, 10, len(IMAGE) - 1])
def test_a_truncated_answer_ends_before_its_length(server: ImageServer, size: int) -> None:
    reply = ask(server, "truncate", bytes=size)
    assert (reply.body, reply.end) == (IMAGE[:size], "closed")
    assert reply.header("Content-Length") == str(len(IMAGE))


def test_a_truncated_chunked_answer_lacks_its_last_chunk(server: ImageServer) -> None:
    reply = ask(server, "truncate", chunked=1)
    assert reply.header("Transfer-Encoding") == "chunked"
    assert reply.header("Content-Length") is None
    assert reply.end == "closed"
    assert unchunked(reply.body + b"0\r\n\r\n") == IMAGE[: len(IMAGE) // 2]


def test_a_chunked_answer_is_whole(server: ImageServer) -> None:
    reply = ask(server, "chunked", size=999)
    assert reply.header("Content-Length") is None
    assert reply.body.startswith(b"3e7\r\n")
    assert unchunked(reply.body) == IMAGE


@pytest.mark.parametrize("zeros", [0, 1000, (32 << 20) + 5])
def test_a_gzip_bomb_is_the_image_and_many_zeros_in_few_bytes(server: ImageServer, zeros: int) -> None:
    reply = ask(server, "gzip-bomb", bytes=zeros)
    assert reply.header("Content-Encoding") == "gzip"
    assert gzip.decompress(reply.body) == IMAGE + bytes(zeros)
    assert len(reply.body) < len(IMAGE) + zeros / 900 + 100


def test_an_image_may_be_damaged_in_its_middle(server: ImageServer) -> None:
    body = ask(server, "damage", bytes=50).body
    differing = [at for at, (have, want) in enumerate(zip(body, IMAGE, strict=True)) if have != want]
    assert 30 < len(differing) <= 50
    assert max(differing) - min(differing) < 50
    assert abs(sum(differing) / len(differing) - len(IMAGE) / 2) < 50
    assert ask(server, "damage", bytes=50).body == body


@pytest.mark.parametrize("format_", ["png", "gif", "jpeg"])
def test_a_small_file_may_say_that_it_is_immense(
    server: ImageServer, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    reply = ask(server, "huge-pixels", format=format_)
    assert reply.header("Content-Type") == f"image/{format_}"
    assert len(reply.body) < 8192
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with Image.open(io.BytesIO(reply.body)) as image:
        assert (image.format, image.size) == (format_.upper(), (50_000, 50_000))


@pytest.mark.parametrize("size", [0, 1000])
def test_a_reset_comes_in_the_middle_of_the_body(server: ImageServer, size: int) -> None:
    reply = ask(server, "reset", bytes=size)
    assert (reply.status, reply.body, reply.end) == (200, IMAGE[:size], "reset")


def test_a_hangup_is_no_answer_at_all(server: ImageServer) -> None:
    reply = ask(server, "hangup")
    assert (reply.raw, reply.end) == (b"", "closed")


def test_a_server_may_drop_the_connection_that_it_promised_to_keep(server: ImageServer) -> None:
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, "drop"), last=False) + request(server.image_url(8), last=False))
        reply = listen(plug)
    assert (reply.body, reply.header("Connection")) == (IMAGE, "keep-alive")
    assert reply.end in ("closed", "reset")
    assert server.stats.requests == 1


def test_a_server_may_send_more_than_its_content_length(server: ImageServer) -> None:
    reply = ask(server, "overrun", bytes=9)
    assert reply.header("Content-Length") == str(len(IMAGE))
    assert reply.body == IMAGE + b"?" * 9


def location(reply: Reply) -> str:
    value = reply.header("Location")
    assert value is not None
    return value


def test_redirects_lead_to_the_image_in_so_many_hops(server: ImageServer) -> None:
    url = server.image_url(7, "redirect", hops=3, status=308)
    statuses: list[int] = []
    while statuses[-1:] != [200]:
        with connect(server) as plug:
            plug.sendall(request(url))
            reply = listen(plug)
        statuses.append(reply.status)
        if reply.status == 308:
            url = location(reply)
            assert url.startswith(server.url)
    assert statuses == [308, 308, 308, 200]
    assert reply.body == IMAGE


@pytest.mark.parametrize(
    "to", ["http://169.254.169.254/latest/", "file:///etc/passwd", "../8.jpg", "http://[::ffff:127.0.0.1]/", "//", "%%"]
)
def test_a_redirect_may_lead_anywhere(server: ImageServer, to: str) -> None:
    assert location(ask(server, "redirect", to=to)) == to


def test_an_endless_body_goes_on_and_on(server: ImageServer) -> None:
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, "endless")))
        reply = listen(plug, at_most=20 << 20)
    assert reply.header("Transfer-Encoding") == "chunked"
    assert IMAGE in reply.body[: len(IMAGE) + 20]
    stats = server.wait_for(lambda stats: stats.in_flight == 0)
    assert stats.outcomes == {"left": 1}


def test_an_endless_head_goes_on_and_on(server: ImageServer) -> None:
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, "endless-head")))
        reply = listen(plug, at_most=1 << 20)
    assert reply.status == 200
    assert b"\r\n\r\n" not in reply.raw
    lines = reply.raw.split(b"\r\n")[1:-1]
    assert len({line.partition(b": ")[0] for line in lines}) == len(lines) > 1000


def test_a_limited_host_refuses_too_many_requests_per_second(server: ImageServer) -> None:
    replies = [ask(server, "limit", rps=3, after=7, tag=n) for n in range(6)]
    assert [reply.status for reply in replies] == [200] * 3 + [429] * 3
    assert [reply.header("Retry-After") for reply in replies] == [None] * 3 + ["7"] * 3
    assert replies[0].body == IMAGE


def test_a_limited_host_admits_again_a_second_later(server: ImageServer) -> None:
    deadline = time.monotonic() + 5
    began = time.monotonic()
    assert ask(server, "limit", rps=1).status == 200
    for tag in itertools.count():
        if ask(server, "limit", rps=1, tag=tag).status == 200:
            break
        assert time.monotonic() < deadline
    assert time.monotonic() - began >= 0.99


def test_a_limited_host_refuses_too_many_requests_at_once(server: ImageServer) -> None:
    url = server.image_url(7, "limit", rps=100, at_once=2, s=0.3)
    plugs = [connect(server) for _ in range(4)]
    for number, plug in enumerate(plugs, start=1):
        plug.sendall(request(url))
        server.wait_for(lambda stats, number=number: stats.requests == number)  # type: ignore[misc]
    assert [listen(plug).status for plug in plugs] == [200, 200, 429, 429]
    for plug in plugs:
        plug.close()


@pytest.mark.parametrize("name", sorted(set(behaviours.KINDS) - {"status", "stall"}))
def test_the_outcome_of_a_misbehaviour_depends_on_its_kind(server: ImageServer, name: str) -> None:
    """`image_comes` is what tests of clients go by: a patient and correct client has the image in the end."""
    quick: dict[str, dict[str, Any]] = {
        "trickle": {"bps": 100_000},
        "trickle-head": {"bps": 1000},
        "delay": {"s": 0},
        "gzip-bomb": {"bytes": 1000},
    }
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, name, **quick.get(name, {}))))
        reply = listen(plug, QUIET_S if name.startswith("stall") else PATIENCE_S, at_most=1 << 20)
    body = reply.body
    if reply.raw.startswith(b"HTTP/1.1 103"):
        body = body.partition(b"\r\n\r\n")[2]
    if reply.header("Transfer-Encoding") and behaviours.KINDS[name].image_comes:
        body = unchunked(body)
    if reply.header("Content-Encoding"):
        body = gzip.decompress(body)
    if length := reply.header("Content-Length"):
        body = body[: int(length)] if name != "gzip" else body
    came = body == IMAGE or reply.header("Location") is not None
    assert came == behaviours.KINDS[name].image_comes
