"""The HTTP server: which clients it lets in, and that none that is slow or silent keeps others out."""

import gzip
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.registry import Collector

from sdp.errors import UserError
from sdp.exporter import server as web
from tests.exporter_kit import certificate


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("answer", "A number.", registry=made).set(42)
    return made


@contextmanager
def serving(metrics: CollectorRegistry | None = None, tls: web.Tls | None = None) -> Iterator[web.Server]:
    server = web.Server("127.0.0.1", 0, metrics or registry(), tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def tls_of(folder: Path, client_ca: Path | None = None) -> web.Tls:
    return web.Tls(*certificate(folder), client_ca)


def ask(
    server: web.Server,
    path: str = "/metrics",
    headers: dict[str, str] | None = None,
    method: str = "GET",
    ca: Path | None = None,
    client: tuple[Path, Path] | None = None,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    port = server.server_address[1]
    if ca:
        context = ssl.create_default_context(cafile=ca)
        if client:
            context.load_cert_chain(*client)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=10, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_metrics_are_served_as_text_as_openmetrics_and_compressed() -> None:
    with serving() as server:
        status, headers, body = ask(server)
        assert (status, b"answer 42.0" in body) == (200, True)
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        _, headers, body = ask(server, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")
        _, headers, body = ask(server, headers={"Accept-Encoding": "gzip"})
        assert headers["Content-Encoding"] == "gzip"
        assert b"answer 42.0" in gzip.decompress(body)


def test_there_is_a_health_check_a_first_page_and_nothing_else() -> None:
    with serving() as server:
        assert ask(server, "/healthz")[::2] == (200, b"ok\n")
        assert b'href="/metrics"' in ask(server, "/")[2]
        assert ask(server, "/metrics/..%2f..%2fetc/passwd")[0] == 404
        assert ask(server, "/metrics", method="POST")[0] == 405
        with socket.create_connection(server.server_address[:2], timeout=10) as plug:
            plug.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
            assert plug.recv(100).split()[1] == b"404"
        status, headers, body = ask(server, "/healthz", method="HEAD")
        assert (status, headers["Content-Length"], body) == (200, "3", b"")


def test_with_a_client_authority_only_clients_with_its_certificate_get_metrics(tmp_path: Path) -> None:
    trusted, stranger = certificate(tmp_path / "trusted", "prometheus"), certificate(tmp_path / "stranger", "guest")
    with serving(tls=tls_of(tmp_path, trusted[0])) as server:
        ca = tmp_path / "exporter.crt"
        assert ask(server, ca=ca, client=trusted)[0] == 200
        for client in (None, stranger):
            for path in ("/metrics", "/healthz"):
                with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
                    ask(server, path, ca=ca, client=client)
        assert ask(server, ca=ca, client=trusted)[0] == 200


def test_a_renewed_certificate_is_used_for_the_next_connection_and_a_broken_one_is_not(tmp_path: Path) -> None:
    with serving(tls=tls_of(tmp_path)) as server:
        cert, key = tmp_path / "exporter.crt", tmp_path / "exporter.key"
        assert ask(server, ca=cert)[0] == 200
        first = cert.read_bytes(), key.read_bytes()
        certificate(tmp_path)
        assert ask(server, ca=cert)[0] == 200
        second = tmp_path / "second.crt"
        second.write_bytes(cert.read_bytes())
        (tmp_path / "first.crt").write_bytes(first[0])
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, ca=tmp_path / "first.crt")
        cert.write_text("nonsense")
        assert ask(server, ca=second)[0] == 200


def test_plain_http_is_not_answered_where_there_is_tls(tmp_path: Path) -> None:
    with serving(tls=tls_of(tmp_path)) as server, pytest.raises((http.client.HTTPException, OSError)):
        ask(server)


def test_a_silent_client_blocks_no_one_and_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 1.0)
    with serving(tls=tls_of(tmp_path)) as server:
        silent = [socket.create_connection(server.server_address[:2], timeout=10) for _ in range(8)]
        assert ask(server, ca=tmp_path / "exporter.crt")[0] == 200
        assert [plug.recv(1) for plug in silent] == [b""] * 8
        for plug in silent:
            plug.close()


def test_a_request_that_drips_is_cut_off_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 0.5)
    with serving() as server, socket.create_connection(server.server_address[:2], timeout=10) as plug:
        began = time.monotonic()
        plug.settimeout(0.05)
        while time.monotonic() - began < 10:
            try:
                plug.sendall(b"X")
                if plug.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("tls", [False, True])
def test_however_many_connect_and_say_nothing_health_and_metrics_are_answered(tmp_path: Path, tls: bool) -> None:
    """The kubelet's probe has five seconds; after three that fail it starts the exporter again."""
    ca = tmp_path / "exporter.crt" if tls else None
    with serving(tls=tls_of(tmp_path) if tls else None) as server, ExitStack() as stack:
        plugs: list[socket.socket] = []
        for _ in range(2):
            for _ in range(web.MAX_CONNECTIONS):
                plug = socket.create_connection(server.server_address[:2], timeout=10)
                plugs.append(stack.enter_context(plug))
            began = time.monotonic()
            assert ask(server, "/healthz", ca=ca)[0] == 200
            assert ask(server, ca=ca)[0] == 200
            assert time.monotonic() - began < 2.5
        assert plugs[0].recv(1) == b""  # those that were silent for longest went
        plugs[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            plugs[-1].recv(1)


def test_a_handshake_that_drips_is_cut_off_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 0.5)
    with (
        serving(tls=tls_of(tmp_path)) as server,
        socket.create_connection(server.server_address[:2], timeout=10) as plug,
    ):
        began = time.monotonic()
        plug.settimeout(0.05)
        hello = iter(b"\x16\x03\x01\x40\x00" + bytes(1000))
        while time.monotonic() - began < 10:
            try:
                plug.sendall(bytes([next(hello)]))
                if plug.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - began < 5


class Slow(Collector):
    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def collect(self) -> Iterator[object]:  # type: ignore[override]
        self.begun.release()
        assert self.go.wait(10)
        return iter(())


def test_a_stop_lets_a_scrape_under_way_end_and_takes_no_more() -> None:
    slow, metrics = Slow(), CollectorRegistry()
    metrics.register(slow)  # type: ignore[arg-type]
    server = web.Server("127.0.0.1", 0, metrics)
    server.start()
    answers: list[int] = []
    scraping = threading.Thread(target=lambda: answers.append(ask(server)[0]))
    scraping.start()
    assert slow.begun.acquire(timeout=10)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    end = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(server.server_address[:2], timeout=10).close()
        except OSError:
            break
        assert time.monotonic() < end
    assert stopping.is_alive()
    slow.go.set()
    stopping.join(10)
    scraping.join(10)
    assert answers == [200]


def test_scrapes_that_hang_leave_room_for_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_SCRAPES", 3)
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 5)
    slow, metrics = Slow(), CollectorRegistry()
    metrics.register(slow)  # type: ignore[arg-type]
    with serving(metrics) as server, ExitStack() as stack:
        answers: list[int] = []
        scraping = [threading.Thread(target=lambda: answers.append(ask(server)[0])) for _ in range(3)]
        for thread in scraping:
            thread.start()
        assert all(slow.begun.acquire(timeout=10) for _ in scraping)
        assert ask(server)[0] == 503
        for _ in range(6):
            stack.enter_context(socket.create_connection(server.server_address[:2], timeout=10))
        assert ask(server, "/healthz")[0] == 200
        slow.go.set()
        for thread in scraping:
            thread.join(10)
        assert answers == [200] * 3
        assert ask(server)[0] == 200


class Broken(Collector):
    def collect(self) -> Iterator[object]:  # type: ignore[override]
        raise ValueError("a bug")


def test_a_scrape_that_fails_is_an_error_for_the_scraper_and_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CollectorRegistry()
    metrics.register(Broken())  # type: ignore[arg-type]
    with serving(metrics) as server:
        assert ask(server)[0] == 500
        assert ask(server, "/healthz")[0] == 200
    assert "ValueError: a bug" in caplog.text


def test_clients_that_read_no_reply_block_no_one() -> None:
    metrics = registry()
    Gauge("large", "x" * (6 << 20), registry=metrics)  # more than the sockets' buffers hold
    with serving(metrics) as server, ExitStack() as stack:
        for _ in range(web.MAX_CONNECTIONS + 4):
            plug = stack.enter_context(socket.socket())
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plug.settimeout(10)
            plug.connect(server.server_address[:2])
            plug.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            plug.recv(1)  # its reply has begun
        began = time.monotonic()
        assert ask(server, "/healthz")[0] == 200
        assert ask(server)[0] == 200
        assert time.monotonic() - began < 5


BAD_TLS = {
    "a certificate that is not there": ("no.crt", "exporter.key", None, "--tls-cert: {}/no.crt: No such file"),
    "a key that is not there": ("exporter.crt", "no.key", None, "--tls-key: {}/no.key: No such file"),
    "another certificate's key": ("exporter.crt", "other.key", None, "exporter.crt, {}/other.key: KEY_VALUES_MISMATCH"),
    "no certificate": ("text", "exporter.key", None, "--tls-cert, --tls-key: {}/text"),
    "a key with a password": ("exporter.crt", "locked.key", None, "--tls-cert, --tls-key: "),
    "an authority that is no certificate": ("exporter.crt", "exporter.key", "text", "--tls-client-ca: {}/text: "),
    "a folder": ("exporter.crt", "exporter.key", ".", "--tls-client-ca: {}: Is a directory"),
}


@pytest.mark.parametrize(("cert", "key", "authority", "message"), BAD_TLS.values(), ids=BAD_TLS)
def test_certificates_that_cannot_work_are_one_line(
    tmp_path: Path, cert: str, key: str, authority: str | None, message: str
) -> None:
    certificate(tmp_path)
    certificate(tmp_path, "other")
    (tmp_path / "text").write_text("nonsense")
    plain = serialization.load_pem_private_key((tmp_path / "exporter.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "locked.key").write_bytes(
        plain.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    with pytest.raises(UserError) as caught:
        web.Tls(tmp_path / cert, tmp_path / key, tmp_path / authority if authority else None)
    assert message.format(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_and_an_address_that_is_not_here_are_one_line() -> None:
    with serving() as server:
        port = server.server_address[1]
        with pytest.raises(UserError, match=rf"^cannot listen on 127.0.0.1 port {port}: Address already in use; .*$"):
            web.Server("127.0.0.1", port, registry())
    for address, number in (("192.0.2.1", 0), ("no such name.invalid", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1)):
        with pytest.raises(UserError, match=f"^cannot listen on {address} port {number}: [^\n]+$"):
            web.Server(address, number, registry())
