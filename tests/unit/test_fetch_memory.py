"""The buffer is a bound, whatever servers send."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sdp.config.download import FetchConfig, HostsConfig
from sdp.urls import parse
from tests.fetching import fetch_apart
from tests.unit.test_fetch import fetching

HOSTS = 20
BODY, LIMIT = 12_000_000, 60_000_000


class Long(BaseHTTPRequestHandler):
    """Sends bodies of unknown length, for /tiny in tiny chunks, and for /hold a byte of many that it announces."""

    protocol_version = "HTTP/1.1"
    over = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path.startswith(("/hold", "/short")):
            self.send_header("Content-Length", str(BODY) if self.path.startswith("/hold") else "1")
            self.end_headers()
            self.wfile.write(b"x")
            if self.path.startswith("/hold"):
                self.over.wait()
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chunk = b"2\r\nxx\r\n" * 5_000 if self.path.startswith("/tiny") else b"186a0\r\n" + bytes(100_000) + b"\r\n"
        for _ in range(BODY // 100_000):
            self.wfile.write(chunk)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("0.0.0.0", 0), Long) as server:
        server.daemon_threads = True
        Long.over.clear()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        Long.over.set()
        server.shutdown()


@pytest.mark.parametrize(("folder", "hosts", "limit"), [("", HOSTS, LIMIT), ("tiny/", 3, LIMIT // 6)])
def test_bodies_of_unknown_length_from_many_hosts_stay_within_the_bound(
    port: int, folder: str, hosts: int, limit: int
) -> None:
    urls = [f"http://127.0.0.{host}:{port}/{folder}{number}.jpg" for number in range(2) for host in range(1, hosts + 1)]
    result = fetch_apart(urls, buffer_bytes=limit, max_bytes=BODY, timeout_s=600.0)
    assert (set(result["reasons"]), result["held"]) == ({None}, 0)
    assert result["grown"] < 1.2 * limit + (4 << 20), f"{result['grown']:,} bytes against {limit:,}"


def test_a_host_that_announces_much_and_sends_little_does_not_hold_up_the_others(port: int) -> None:
    urls = [f"http://127.0.0.1:{port}/hold/{number}.jpg" for number in range(16)]
    urls += [f"http://127.0.1.{number}:{port}/short.jpg" for number in range(1, 101)]
    options = FetchConfig(allow_networks=("127.0.0.0/8",), timeout_s=1800.0, max_bytes=BODY, connections=32)
    with fetching(options, HostsConfig(at_once=100, per_second=None), LIMIT) as (fetcher, basket):
        fetcher.submit((number, parse(url)) for number, url in enumerate(urls))
        results = basket.wait_for(100, deadline_s=60.0)
    assert {result.token: result.failure for result in results} == dict.fromkeys(range(16, 116))
