"""Tests of silent misbehaviours of the image server, and its counts: a wrong one would hide a fault of a client."""

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from scripts.demo import shapes
from tests.misbehaving.server import ImageServer

PATIENCE_S = 10.0
IMAGE = shapes.encode(shapes.sample(7))[0]


@pytest.fixture(scope="module")
def running() -> Iterator[ImageServer]:
    with ImageServer(images=1000, distinct=40) as server:
        yield server


@pytest.fixture
def server(running: ImageServer) -> ImageServer:
    running.wait_for(lambda stats: stats.in_flight == 0)
    running.reset()
    return running


def connect(server: ImageServer) -> socket.socket:
    return socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S)


def request(url: str, host: str = "", *, last: bool = True) -> bytes:
    target = urlsplit(url)
    lines = [f"GET {target.path}?{target.query} HTTP/1.1", f"Host: {host or target.netloc}"]
    return "\r\n".join([*lines, *(["Connection: close"] if last else []), "", ""]).encode()


def ask(server: ImageServer, do: str, **parameters: Any) -> tuple[bytes, bytes, float]:
    """Send one request; return the head and body as they came, and the seconds that it took."""
    began = time.monotonic()
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, do, **parameters)))
        raw = b"".join(iter(lambda: plug.recv(1 << 18), b""))
    head, _, body = raw.partition(b"\r\n\r\n")
    return head, body, time.monotonic() - began


@pytest.mark.parametrize(
    ("do", "parameters", "least_s"),
    [("delay", {"s": 0.3}, 0.29), ("trickle", {"bps": 4 * len(IMAGE)}, 0.2), ("trickle-head", {"bps": 400}, 0.1)],
)
def test_a_slow_answer_takes_its_time(
    server: ImageServer, do: str, parameters: dict[str, float], least_s: float
) -> None:
    _, body, seconds = ask(server, do, **parameters)
    assert body == IMAGE
    assert seconds >= least_s


def test_a_server_may_drop_the_connection_that_it_promised_to_keep(server: ImageServer) -> None:
    with connect(server) as plug:
        plug.sendall(request(server.image_url(7, "drop"), last=False) + request(server.image_url(8), last=False))
        answer = http.client.HTTPResponse(plug)
        answer.begin()
        assert (answer.will_close, answer.read()) == (False, IMAGE)
        with suppress(ConnectionResetError):
            assert plug.recv(1) == b""
    assert server.stats.requests == 1


def test_a_server_may_send_more_than_its_content_length(server: ImageServer) -> None:
    head, body, _ = ask(server, "overrun", bytes=9)
    assert f"Content-Length: {len(IMAGE)}".encode() in head
    assert body == IMAGE + b"?" * 9


def test_requests_at_once_are_counted_overall_and_by_host(server: ImageServer) -> None:
    with ExitStack() as stack:
        for host in ["a.example"] * 3 + ["B.example"] * 2:
            stack.enter_context(plug := connect(server))
            plug.sendall(request(server.image_url(1, "stall"), host))
        server.wait_for(lambda stats: stats.in_flight == 5)
    server.wait_for(lambda stats: stats.in_flight == 0)
    stats = server.stats
    assert (stats.most_at_once, stats.connections) == (5, 5)
    assert {host: stats.at(host).most_at_once for host in ("a.example", "b.example")} == {
        "a.example": 3,
        "b.example": 2,
    }
