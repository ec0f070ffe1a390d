"""`fetch.buffer_mb` is a bound, whatever servers send."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

HOSTS = 20
BODY, LIMIT = 12_000_000, 60_000_000

FETCH = """
import json, sys, threading
from sdp.config.download import FetchConfig
from sdp.download.fetch import Fetcher
from sdp.download.memory import Buffer
from sdp.download.budgets import HostLimits
from sdp.download.turnstile import LocalGate
from sdp.urls import parse

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

urls, limit, most = json.loads(sys.argv[1])
buffer, ended, done = Buffer(limit), [], threading.Event()

def take(fetched):
    ended.append(fetched.failure and fetched.failure.detail)
    buffer.release(fetched.size)
    if len(ended) == len(urls):
        done.set()

options = FetchConfig(allow_networks=("127.0.0.0/8",), max_bytes=most, timeout_s=200.0, first_byte_timeout_s=100.0)
before = peak()
fetcher = Fetcher(options, 20, LocalGate(HostLimits(at_once=100)), buffer, take)
fetcher.submit((number, parse(url)) for number, url in enumerate(urls))
came = done.wait(300)
fetcher.close()
print(json.dumps({"came": came, "failures": [each for each in ended if each], "used": buffer.used,
                  "grown": peak() - before, "error": repr(fetcher.error)}))
"""


class Long(BaseHTTPRequestHandler):
    """Sends bodies of unknown length."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(BODY // 100_000):
            self.wfile.write(b"186a0\r\n" + bytes(100_000) + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("0.0.0.0", 0), Long) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_bodies_of_unknown_length_from_many_hosts_stay_within_the_bound(port: int) -> None:
    urls = [f"http://127.0.0.{host}:{port}/{number}.jpg" for number in range(2) for host in range(1, HOSTS + 1)]
    given = json.dumps([urls, LIMIT, BODY])
    ended = subprocess.run(
        [sys.executable, "-c", FETCH, given], capture_output=True, text=True, timeout=400, check=True
    )
    result = json.loads(ended.stdout)
    assert (result["came"], result["failures"], result["used"], result["error"]) == (True, [], 0, "None")
    assert result["grown"] < 1.2 * LIMIT, f"{result['grown']:,} bytes against {LIMIT:,}"
