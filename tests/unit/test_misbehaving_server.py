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

from scripts.demo import shapes
from sdp.errors import SdpError, UserError
from tests.misbehaving.gallery import Gallery
from tests.misbehaving.server import ImageServer, image_index

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


def test_the_images_are_those_of_the_metadata_table() -> None:
    with ImageServer(images=3, seed=5) as server:
        urls = shapes.metadata_table(3, server.url, seed=5)["URL"].to_pylist()
        assert urls == [server.image_url(index) for index in range(3)]
        for index, url in enumerate(urls):
            data, content_type, _ = shapes.encode(shapes.sample(index, 5))
            with client(server) as connection:
                connection.request("GET", urlsplit(url).path)
                answer = connection.getresponse()
                assert (answer.status, answer.headers["Content-Type"]) == (200, content_type)
                assert answer.read() == data


@pytest.mark.parametrize(
    ("target", "index"),
    [
        ("/images/000000007.jpg", 7),
        ("/image/7.jpg", 7),
        ("/image/7", 7),
        ("/image/0", 0),
        ("/any/folder/images/12.webp?x=/image/3.jpg", 12),
        ("/images/", None),
        ("/images/7.jpg/more", None),
        ("/images/x.jpg", None),
        ("/imageset/7.jpg", None),
        ("/", None),
    ],
)
def test_an_image_is_found_by_its_number_whatever_stands_around_it(target: str, index: int | None) -> None:
    assert image_index(target) == index


def test_one_connection_serves_many_requests(server: ImageServer) -> None:
    with client(server) as connection:
        for index in range(20):
            assert get(connection, server.image_url(index)) == (200, small(index)[0])
    stats = server.stats
    assert (stats.requests, stats.connections, stats.max_connections) == (20, 1, 1)
    assert {visit.connection for visit in server.visits()} == {server.visits()[0].connection}


def test_requests_sent_ahead_are_answered_in_their_order(server: ImageServer) -> None:
    paths = [f"/image/{index}?do=delay&s=0.01" if index % 100 == 0 else f"/image/{index}" for index in range(1000)]
    heads = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths * 3]
    with socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as plug:
        sender = threading.Thread(target=plug.sendall, args=(b"".join(heads),))
        sender.start()
        with plug.makefile("rb") as stream:
            for index in list(range(1000)) * 3:
                assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
                while stream.readline() != b"\r\n":
                    pass
                assert stream.read(len(small(index)[0])) == small(index)[0]
        sender.join(PATIENCE_S)


def test_a_request_may_come_in_pieces(server: ImageServer) -> None:
    with socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as plug:
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /image/3 HTTP/1.1\r\nConnection: close\r\n\r\n":
            plug.sendall(bytes([byte]))
        with plug.makefile("rb") as stream:
            assert stream.read().endswith(small(3)[0])
    assert server.stats.requests == 1


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET /image/3 HTTP/1.1\r\n\r\n", True),
        (b"GET /image/3 HTTP/1.1\r\nConnection: Close\r\n\r\n", False),
        (b"GET /image/3 HTTP/1.0\r\n\r\n", False),
        (b"GET /image/3 HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", True),
    ],
)
def test_a_connection_is_kept_as_the_client_wishes(server: ImageServer, head: bytes, kept: bool) -> None:
    answer = http.client.HTTPResponse
    with socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as plug:
        for _ in range(2 if kept else 1):
            plug.sendall(head)
            reply = answer(plug)
            reply.begin()
            assert reply.headers["Connection"] == ("keep-alive" if kept else "close")
            assert reply.read() == small(3)[0]
        if not kept:
            assert at_end(plug)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /image/3 HTTP/2\r\n\r\n", 400),
        (b"GET /image/3 HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /image/3 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 400),
        (b"POST /image/3 HTTP/1.1\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc", 405),
        (b"GET /image/1000 HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
        (b"GET /elsewhere HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
        (b"GET /image/3 HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
    ],
)
def test_a_bad_request_is_answered_with_400(server: ImageServer, head: bytes, status: int) -> None:
    with socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as plug:
        plug.sendall(head)
        assert plug.recv(12) == b"HTTP/1.1 %d" % status
        while plug.recv(1 << 16):
            pass


def test_images_repeat_where_few_are_distinct() -> None:
    made: list[int] = []

    def source(index: int) -> tuple[bytes, str, str]:
        made.append(index)
        return small(index)

    with ImageServer(images=1000, distinct=3, source=source) as server:
        for index in (2, 5, 8, 997):
            assert fetch(server, server.image_url(index)) == (200, small(index % 3)[0])
    assert sorted(made) == [1, 2]


def test_an_image_that_many_want_at_once_is_made_once() -> None:
    made: list[int] = []
    gate = threading.Event()

    def source(index: int) -> tuple[bytes, str, str]:
        gate.wait(PATIENCE_S)
        made.append(index)
        return small(index)

    with ImageServer(source=source) as server, waiting(server, 10, "plain"), waiting(server, 10, "plain"):
        gate.set()
        server.wait_for(lambda stats: stats.outcomes == {"done": 20})
    assert sorted(made) == list(range(10))


def test_warming_makes_all_images_ahead() -> None:
    made: set[int] = set()

    def source(index: int) -> tuple[bytes, str, str]:
        made.add(index)
        return small(index)

    with ImageServer(images=50, source=source) as server:
        server.warm()
        assert made == set(range(50))


def test_a_gallery_keeps_the_latest_used_within_its_bytes() -> None:
    async def visit() -> list[int]:
        gallery = Gallery(lambda _: (bytes(1000), "image/png", "png"), 10, kept_bytes=3500)
        for index in (0, 1, 2, 0, 3):
            await gallery.image(index)
        gallery.close()
        return [index for index in range(10) if gallery.ready(index)]

    assert asyncio.run(visit()) == [0, 2, 3]


def test_an_image_that_cannot_be_made_ends_its_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def source(index: int) -> tuple[bytes, str, str]:
        if index == 3:
            raise ArithmeticError("three is not drawn")
        return small(index)

    with ImageServer(source=source) as server:
        with pytest.raises(http.client.RemoteDisconnected):
            fetch(server, server.image_url(3))
        assert fetch(server, server.image_url(4))[0] == 200
    assert "three is not drawn" in caplog.text


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


def test_a_reset_forgets_finished_requests_only(server: ImageServer) -> None:
    with waiting(server, 3):
        server.reset()
        stats = server.stats
        assert (stats.requests, stats.in_flight, stats.max_concurrent, stats.open_connections) == (0, 3, 3, 3)
        assert stats.hosts["localhost"].in_flight == 3
    stats = server.wait_for(lambda stats: stats.open_connections == 0)
    assert (stats.in_flight, stats.outcomes) == (0, {})
    assert stats.hosts["localhost"].in_flight == 0


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


def test_requests_one_after_the_other_are_never_at_once(server: ImageServer) -> None:
    with client(server) as connection:
        for index in range(30):
            get(connection, server.image_url(index))
    stats = server.stats
    assert (stats.max_concurrent, stats.hosts["127.0.0.1"].max_concurrent) == (1, 1)


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


def test_a_small_answer_over_tls_is_done_though_its_connection_stays() -> None:
    with ImageServer(source=small, tls=True) as server:
        context = ssl.create_default_context(cafile=server.certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=PATIENCE_S)
        for count in (1, 2):
            assert get(connection, server.image_url(1))[0] == 200
            assert server.wait_for(lambda stats: stats.in_flight == 0).outcomes == {"done": count}
        connection.close()


def test_a_client_that_sends_on_and_on_is_cut_off(server: ImageServer) -> None:
    with waiting(server, 1) as (plug,):
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            plug.sendall(bytes(64 << 20))
        assert server.wait_for(lambda stats: stats.in_flight == 0).outcomes == {"expired": 1}


def test_a_client_that_leaves_ends_its_response(server: ImageServer) -> None:
    def trickling() -> int:
        return sum("Connection._run" in repr(task.get_coro()) for task in asyncio.all_tasks(server._running.loop))

    with waiting(server, 3, "trickle&bps=1"):
        settle(server)
        assert trickling() == 3
    server.wait_for(lambda stats: stats.open_connections == 0)
    settle(server)
    assert trickling() == 0


def test_a_client_that_leaves_takes_nothing_from_those_who_wait_for_the_same_image() -> None:
    gate = threading.Event()

    def source(index: int) -> tuple[bytes, str, str]:
        gate.wait(PATIENCE_S)
        return small(index)

    with ImageServer(source=source) as server:
        with waiting(server, 1, "plain"):
            stack = contextlib.ExitStack()
            (plug,) = stack.enter_context(waiting(server, 1, "plain"))
            server.wait_for(lambda stats: stats.in_flight == 2)
        server.wait_for(lambda stats: stats.open_connections == 1)
        gate.set()
        with stack:
            assert plug.recv(12) == b"HTTP/1.1 200"


def test_two_hundred_stalled_connections_leave_the_others_alone(server: ImageServer) -> None:
    with waiting(server, 200) as plugs:
        with client(server) as connection:
            began = time.monotonic()
            for index in range(500):
                assert get(connection, server.image_url(index)) == (200, small(index)[0])
            # Unhindered it takes about 0.3 s; to wait for one stall would take two minutes.
            assert time.monotonic() - began < 60
        # The last answer arrives before the server has counted it.
        stats = server.wait_for(lambda stats: stats.in_flight == 200)
        assert stats.hosts["localhost"].max_concurrent == 200
        assert stats.outcomes == {"done": 500}
        for plug in plugs:
            plug.setblocking(False)
            with pytest.raises(BlockingIOError):
                plug.recv(1)
    assert server.wait_for(lambda stats: stats.in_flight == 0).outcomes == {"done": 500, "left": 200}


@pytest.mark.parametrize("do", ["stall", "stall-head", "stall-body", "trickle&bps=1", "delay&s=100", "endless"])
def test_every_misbehaviour_ends_with_the_servers_patience(do: str) -> None:
    with ImageServer(source=small, life_s=0.4) as server, waiting(server, 2, do) as plugs:
        # A client that does not read an endless answer must not keep the server busy.
        stats = server.wait_for(lambda stats: stats.in_flight == 0)
        assert stats.outcomes == {"expired": 2}
        server.wait_for(lambda stats: stats.open_connections == 0)
        for plug in plugs:
            with contextlib.suppress(ConnectionResetError):
                while plug.recv(1 << 20):
                    pass


@pytest.mark.parametrize("words", [b"", b"GET /image/1 HTT", b"GET /image/1 HTTP/1.1\r\n\r\n"])
def test_a_client_that_says_nothing_more_is_let_go(words: bytes) -> None:
    with (
        ImageServer(source=small, life_s=0.4) as server,
        socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as plug,
    ):
        plug.sendall(words)
        while not at_end(plug):
            pass
        assert server.stats.outcomes in ({}, {"done": 1})


def test_the_servers_timeout_restarts_with_each_request(server: ImageServer) -> None:
    with socket.create_connection((server.hosts[0], server.port), timeout=PATIENCE_S) as plug:
        server.wait_for(lambda stats: stats.open_connections == 1)
        settle(server)
        (connection,) = server._running._connections
        before = connection.deadline
        plug.sendall(b"GET /image/1?do=stall HTTP/1.1\r\n\r\n")
        server.wait_for(lambda stats: stats.in_flight == 1)
        settle(server)
        assert before < connection.deadline < time.monotonic() + server.life_s


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


def test_connections_one_after_the_other_are_never_open_at_once(server: ImageServer) -> None:
    for count in (1, 2, 3):
        fetch(server, server.image_url(1))
        stats = server.wait_for(lambda stats: stats.open_connections == 0)
        assert (stats.connections, stats.max_connections) == (count, 1)
        assert (stats.hosts["127.0.0.1"].connections, stats.hosts["127.0.0.1"].max_connections) == (count, 1)


def test_hosts_count_their_attempts_apart(server: ImageServer) -> None:
    for host in ("a.example", "b.example"):
        url = server.image_url(1, "500", times=1)
        assert [fetch(server, url, Host=host)[0] for _ in range(2)] == [500, 200]


def test_redirects_stay_at_the_host_that_was_asked(server: ImageServer) -> None:
    with client(server) as connection:
        connection.request("GET", "/image/1?do=redirect", headers={"Host": f"a.example:{server.port}"})
        answer = connection.getresponse()
        assert answer.headers["Location"] == f"http://a.example:{server.port}/image/1?do=plain"


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


@pytest.mark.parametrize(
    ("do", "expected"),
    [("stall", TimeoutError), ("truncate", http.client.IncompleteRead), ("reset", OSError), ("hangup", OSError)],
)
def test_misbehaviours_work_over_tls(do: str, expected: type[Exception]) -> None:
    with ImageServer(source=large, tls=True, images=2) as server:
        context = ssl.create_default_context(cafile=server.certificate)
        patience_s = 0.3 if do == "stall" else PATIENCE_S
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=patience_s)
        with pytest.raises((expected, http.client.IncompleteRead) if do == "reset" else expected):
            get(connection, server.image_url(1, do))
        connection.close()
        server.wait_for(lambda stats: stats.in_flight == stats.open_connections == 0)


def test_a_deaf_port_never_completes_a_connection(server: ImageServer) -> None:
    target = urlsplit(server.deaf_url)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            socket.create_connection((target.hostname, target.port), timeout=0.1)


def test_a_refused_port_refuses(server: ImageServer) -> None:
    target = urlsplit(server.refused_url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((target.hostname, target.port), timeout=PATIENCE_S)


def test_a_server_may_be_slow_to_accept() -> None:
    with ImageServer(source=small, accept_delay_s=0.2) as server:
        began = time.monotonic()
        with client(server) as one, client(server) as other:
            one.connect()
            other.connect()
            assert time.monotonic() - began < 0.2
            assert get(other, server.image_url(1))[0] == 200
            assert time.monotonic() - began >= 0.4
            server.accept_delay_s = 0
            assert get(one, server.image_url(1))[0] == 200


def test_a_wait_that_times_out_reports_the_requests_seen(server: ImageServer) -> None:
    with pytest.raises(TimeoutError, match=r"0\.05 s in vain; it saw .*requests=0"):
        server.wait_for(lambda stats: stats.requests == 1, deadline_s=0.05)


def test_a_port_that_is_taken_is_named(server: ImageServer) -> None:
    with pytest.raises(UserError, match=rf"cannot listen at 127\.0\.0\.1:{server.port}: "):
        ImageServer(port=server.port, source=small).start()


def test_a_server_that_was_never_started_says_so() -> None:
    server = ImageServer()
    server.stop()
    with pytest.raises(SdpError, match="never started"):
        _ = server.stats


def test_a_server_starts_again_at_its_port() -> None:
    server = ImageServer(source=small)
    with server:
        port = server.port
        assert fetch(server, server.image_url(1))[0] == 200
    assert server.stats.requests == 1
    with pytest.raises(ConnectionRefusedError):
        fetch(server, server.image_url(1))
    with server:
        assert server.port == port
        assert fetch(server, server.image_url(1))[0] == 200


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


def test_a_server_that_could_not_start_leaves_nothing(server: ImageServer) -> None:
    threads, files = set(threading.enumerate()), open_files()
    with pytest.raises(UserError, match="cannot listen"):
        ImageServer(hosts=("127.0.0.3", "192.0.2.1"), port=server.port, source=small).start()
    assert set(threading.enumerate()) == threads
    assert open_files() == files
