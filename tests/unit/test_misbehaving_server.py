"""The image server of the tests when it behaves: what it serves, what it counts, and that nothing is left of it."""

import asyncio
import contextlib
import gc
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.misbehaving.server import ImageServer

PATIENCE_S = 10.0
"""For what must come."""


def small(index: int) -> tuple[bytes, str, str]:
    return b"image %d " % index * 50, "image/jpeg", "jpg"


def large(index: int) -> tuple[bytes, str, str]:
    """More than all buffers between server and client hold."""
    return bytes([index]) * (24 << 20), "image/jpeg", "jpg"


@pytest.fixture(scope="module")
def running() -> Iterator[ImageServer]:
    with ImageServer(images=1000, source=small) as server:
        yield server


@pytest.fixture
def server(running: ImageServer) -> ImageServer:
    # A connection that an earlier test closed may not have been noticed yet.
    running.wait_for(lambda stats: stats.open_connections == 0)
    running.reset()
    return running


@contextlib.contextmanager
def client(server: ImageServer, host: str = "") -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(host or server.hosts[0], server.port, timeout=PATIENCE_S)
    try:
        yield connection
    finally:
        connection.close()


def get(connection: http.client.HTTPConnection, url: str, **headers: str) -> tuple[int, bytes]:
    target = urlsplit(url)
    connection.request("GET", f"{target.path}?{target.query}" if target.query else target.path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def fetch(server: ImageServer, url: str, **headers: str) -> tuple[int, bytes]:
    with client(server) as connection:
        return get(connection, url, **headers)


@contextlib.contextmanager
def waiting(server: ImageServer, count: int, do: str = "stall", first: int = 0) -> Iterator[list[socket.socket]]:
    """So many connections, each with a request that is not answered yet."""
    with contextlib.ExitStack() as stack:
        plugs = [
            stack.enter_context(socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S))
            for _ in range(count)
        ]
        for index, plug in enumerate(plugs, start=first):
            path = urlsplit(server.image_url(index)).path
            plug.sendall(f"GET {path}?do={do} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        server.wait_for(lambda stats: stats.requests >= count)
        yield plugs


def settle(server: ImageServer) -> None:
    """Let the server finish its current work."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server._running.loop).result(PATIENCE_S)


def at_end(plug: socket.socket) -> bool:
    """Return true if the server ends this connection without sending more."""
    try:
        return plug.recv(1) == b""
    except ConnectionResetError:
        return True


def test_requests_are_counted_by_target_status_and_agent(server: ImageServer) -> None:
    agent = {"User-Agent": "tests/1"}
    for _ in range(3):
        fetch(server, server.image_url(1), **agent)
    fetch(server, server.image_url(2, "429", times=1), **agent)
    fetch(server, server.image_url(2, "429", times=1), **{"User-Agent": "other"})
    path = urlsplit(server.image_url(1)).path
    stats = server.wait_for(lambda stats: stats.open_connections == 0)
    assert stats.attempts[path] == 3
    assert [count for target, count in stats.attempts.items() if "429" in target] == [2]
    assert stats.statuses == {200: 4, 429: 1}
    assert stats.user_agents == {"tests/1": 4, "other": 1}
    assert stats.outcomes == {"done": 5}
    visits = server.visits(2)
    assert [(visit.attempt, visit.status, visit.behaviour) for visit in visits] == [(1, 429, "429"), (2, 200, "")]
    assert visits[0].began <= (visits[0].ended or 0) <= visits[1].began


def test_requests_at_once_are_counted_overall_and_by_host(server: ImageServer) -> None:
    def ask(plug: socket.socket, host: str) -> None:
        plug.sendall(f"GET /image/1?do=stall HTTP/1.1\r\nHost: {host}:{server.port}\r\n\r\n".encode())

    with contextlib.ExitStack() as stack:
        plugs = [
            stack.enter_context(socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S))
            for _ in range(5)
        ]
        for plug, host in zip(plugs, ["a.example"] * 3 + ["B.example"] * 2, strict=True):
            ask(plug, host)
        server.wait_for(lambda stats: stats.in_flight == 5)
    stats = server.wait_for(lambda stats: stats.in_flight == 0 and stats.open_connections == 0)
    assert (stats.max_concurrent, stats.max_connections) == (5, 5)
    assert stats.hosts["a.example"].max_concurrent == stats.hosts["a.example"].max_connections == 3
    assert stats.hosts["b.example"].max_concurrent == stats.hosts["b.example"].max_connections == 2
    assert stats.outcomes == {"left": 5}


def test_requests_a_second_are_those_of_the_busiest_second(server: ImageServer) -> None:
    with client(server) as connection:
        for index in range(30):
            get(connection, server.image_url(index))
        get(connection, server.image_url(1, "delay", s=1))
        get(connection, server.image_url(2))
    began = [visit.began for visit in server.visits()]
    busiest = max(sum(start <= other < start + 1 for other in began) for start in began)
    assert server.stats.hosts["127.0.0.1"].max_per_second == busiest < len(began) == 32


@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_is_in_flight_until_the_client_has_taken_it(tls: bool) -> None:
    with (
        ImageServer(source=large, tls=tls) as server,
        socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as bare,
        contextlib.ExitStack() as stack,
    ):
        plug = bare
        if tls:
            context = ssl.create_default_context(cafile=server.certificate)
            plug = stack.enter_context(context.wrap_socket(bare, server_hostname="127.0.0.1"))
        stream = stack.enter_context(plug.makefile("rb"))
        for _ in range(3):  # made, then sent; then sent at once, twice
            plug.sendall(b"GET /image/1 HTTP/1.1\r\n\r\n")
            while stream.readline() != b"\r\n":
                pass
            settle(server)
            assert server.stats.in_flight == 1
            assert stream.read(24 << 20) == large(1)[0]
            server.wait_for(lambda stats: stats.in_flight == 0)
        assert server.stats.outcomes == {"done": 3}


def test_a_server_listens_at_several_addresses_on_one_port() -> None:
    hosts = ("127.0.0.1", "127.0.0.2", "127.1.2.3")
    with ImageServer(source=small, hosts=hosts) as server:
        assert len({urlsplit(server.url_of(host)).port for host in hosts}) == 1
        for count, host in enumerate(hosts, start=1):
            with client(server, host) as connection:
                for _ in range(count):
                    assert get(connection, server.image_url(1, host=host))[0] == 200
        assert {host: seen.requests for host, seen in server.stats.hosts.items()} == dict(
            zip(hosts, (1, 2, 3), strict=True)
        )


def test_hosts_count_their_attempts_apart(server: ImageServer) -> None:
    for host in ("a.example", "b.example"):
        url = server.image_url(1, "500", times=1)
        assert [fetch(server, url, Host=host)[0] for _ in range(2)] == [500, 200]


def test_tls_is_trusted_by_its_certificate_alone() -> None:
    with ImageServer(source=small, tls=True, hosts=("127.0.0.1", "127.0.0.2")) as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        trusting = ssl.create_default_context(cafile=server.certificate)
        for host in server.hosts:
            connection = http.client.HTTPSConnection(host, server.port, context=trusting, timeout=PATIENCE_S)
            for index in range(5):
                assert get(connection, server.image_url(index, host=host)) == (200, small(index)[0])
            assert get(connection, server.image_url(1, "chunked"))[1] == small(1)[0]
            connection.close()
        stats = server.wait_for(lambda stats: stats.open_connections == 0)
        assert (stats.requests, stats.connections, stats.outcomes) == (12, 2, {"done": 12})
        wary = http.client.HTTPSConnection(
            "127.0.0.1", server.port, context=ssl.create_default_context(), timeout=PATIENCE_S
        )
        with pytest.raises(ssl.SSLCertVerificationError):
            wary.request("GET", "/image/1")
        assert server.wait_for(lambda stats: stats.failed_handshakes == 1).connections == 2
        certificate = server.certificate
    assert not certificate.exists()


def test_a_deaf_port_never_completes_a_connection(server: ImageServer) -> None:
    target = urlsplit(server.deaf_url)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            socket.create_connection((target.hostname, target.port), timeout=0.1)


def test_a_refused_port_refuses(server: ImageServer) -> None:
    target = urlsplit(server.refused_url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((target.hostname, target.port), timeout=PATIENCE_S)


def open_files() -> int:
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))


def is_idle(server: ImageServer) -> None:
    fetch(server, server.image_url(1))


def every_misbehaviour(server: ImageServer) -> None:
    """Leaves with connections in every state; the clients' ends are closed only after the server has stopped."""
    plugs = [socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) for _ in range(12)]
    kinds = ["stall", "trickle&bps=1", "endless", "stall-body", "delay&s=50", "gzip-bomb"]
    for plug, kind in zip(plugs, kinds, strict=False):
        plug.sendall(f"GET /image/1?do={kind} HTTP/1.1\r\n\r\n".encode())
    plugs[-1].sendall(b"GET /image/1 HT")
    server.wait_for(lambda stats: stats.requests == (0 if server.tls else len(kinds)))
    assert server.deaf_url != server.refused_url
    _LEFT_BEHIND.extend(plugs)


def connections_not_yet_accepted(server: ImageServer) -> None:
    for _ in range(3):
        _LEFT_BEHIND.append(socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S))


_LEFT_BEHIND: list[socket.socket] = []


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning", "error::ResourceWarning")
@pytest.mark.parametrize(
    ("trouble", "tls", "accept_delay_s"),
    [
        (is_idle, False, 0.0),
        (every_misbehaviour, False, 0.0),
        (every_misbehaviour, True, 0.0),
        (connections_not_yet_accepted, False, 30.0),
        (connections_not_yet_accepted, True, 30.0),
    ],
)
def test_nothing_is_left_of_a_server_that_was_stopped(
    trouble: Callable[[ImageServer], None], tls: bool, accept_delay_s: float
) -> None:
    with ImageServer(source=small, tls=True):
        """Load now what is loaded once and kept."""
    threads, files = set(threading.enumerate()), open_files()
    began = time.monotonic()
    with ImageServer(source=small, tls=tls, accept_delay_s=accept_delay_s) as server:
        trouble(server)
    assert time.monotonic() - began < PATIENCE_S
    assert server.stats.in_flight == server.stats.open_connections == 0
    for plug in _LEFT_BEHIND:
        plug.close()
    _LEFT_BEHIND.clear()
    assert set(threading.enumerate()) == threads
    assert open_files() == files
