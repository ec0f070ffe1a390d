"""The demo's image server: its pictures, its failures, and clients that leave."""

import http.client
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from sdp.demo import shapes
from sdp.demo.server import FAILURES, ServerFailure, failure_of, serve

IMAGES = 2000
Reply = tuple[http.client.HTTPResponse, bytes]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve(IMAGES) as port:
        yield port


def get(port: int, path: str, host: str = "127.0.0.1") -> Reply:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()


def path_of(index: int) -> str:
    return f"/{shapes.sample(index).path}"


def index_with(failure: ServerFailure | None) -> int:
    return next(index for index in range(IMAGES) if failure_of(index) == failure)


def test_the_pictures_are_those_of_the_metadata_over_one_connection(port: int) -> None:
    healthy = [index for index in range(30) if failure_of(index) is None][:5]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for index in healthy:
        connection.request("GET", path_of(index))
        reply = connection.getresponse()
        data, content_type, _ = shapes.encode(shapes.sample(index))
        assert (reply.status, reply.headers["Content-Type"], reply.read()) == (200, content_type, data)
        assert connection.sock is not None, "the connection stays open"
    connection.close()


def test_the_failures_are_as_frequent_as_their_table_says() -> None:
    counts = Counter(FAILURES.index(failure) for index in range(20_000) if (failure := failure_of(index)))
    for number, failure in enumerate(FAILURES):
        assert abs(counts[number] / 200 - failure.percent) < 0.5, failure


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: f"{failure.status}-{failure.percent}")
def test_a_failure_that_passes_is_followed_by_the_picture(failure: ServerFailure) -> None:
    index = index_with(failure)
    picture = shapes.encode(shapes.sample(index))[0]
    with serve(IMAGES) as port:
        for _ in range(failure.times or 3):
            if failure.whole_length:
                with pytest.raises(http.client.IncompleteRead) as broken:
                    get(port, path_of(index))
                assert broken.value.partial == failure.body(picture)
            else:
                reply, data = get(port, path_of(index))
                assert (reply.status, data) == (failure.status, failure.body(picture))
                assert failure.headers.items() <= dict(reply.headers).items()
        if failure.times is not None:
            assert get(port, path_of(index))[1] == picture


@pytest.mark.parametrize("path", ["/", "/images/", "/images/x.jpg", f"/images/{IMAGES:09d}.jpg", "/elsewhere/1.jpg"])
def test_files_that_are_not_pictures_are_ignored(port: int, path: str) -> None:
    assert get(port, path)[0].status == 404


def test_several_hosts_share_one_port() -> None:
    index = index_with(None)
    with serve(IMAGES, ("127.0.0.1", "127.0.0.2")) as port:
        for host in ("127.0.0.1", "127.0.0.2"):
            assert get(port, path_of(index), host)[0].status == 200
    with pytest.raises(ConnectionRefusedError):
        get(port, path_of(index))


def test_a_client_that_leaves_early_is_no_error(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    index = index_with(None)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leaves with a reset
        client.sendall(f"GET {path_of(index)} HTTP/1.1\r\n\r\n".encode() * 50)
    assert get(port, path_of(index))[0].status == 200
    assert capfd.readouterr().err == ""


def test_an_error_of_the_server_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_: shapes.Shape) -> tuple[bytes, str, str]:
        raise ArithmeticError("not drawn")

    monkeypatch.setattr(shapes, "encode", fail)
    with serve(IMAGES) as port, pytest.raises(http.client.RemoteDisconnected):
        get(port, path_of(0))
    assert "not drawn" in capfd.readouterr().err
