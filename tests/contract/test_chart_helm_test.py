"""The script of `helm test` against a server that answers as Prometheus does."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ended

SCRIPT = Path(__file__).parents[2] / "charts" / "sdp-monitoring" / "files" / "helm_test.py"
POOL = "podMonitor/monitoring/sdp-exporter/0"
TARGETS = [
    {"scrapePool": POOL, "health": "up", "lastError": "", "scrapeUrl": "http://10.0.0.1:9850/metrics"},
    {"scrapePool": "node", "health": "down", "lastError": "refused", "scrapeUrl": "http://10.0.0.2:9100"},
]


class Server:
    """Answers by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/api/v1/scrape_pools": {"data": {"scrapePools": ["node", POOL]}},
            "/api/v1/rules": {"data": {"groups": [{"name": "sdp-gpu"}]}},
            "/api/v1/targets?state=active": {"data": {"activeTargets": TARGETS}},
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in outer.answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(outer.answers.get(self.path)).encode())

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def run(*arguments: str) -> tuple[int, str]:
    """Run the test as its pod does, without any package; return its exit code and output."""
    done = ended([sys.executable, "-S", "-c", SCRIPT.read_text(), *arguments], env={})
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([f"--pool={POOL}", "--group=sdp-gpu"], ""),
        (["--pool=podMonitor/monitoring/other/0"], "no scrape job podMonitor/monitoring/other/0"),
        ([f"--pool={POOL}", "--group=sdp-training"], "no rules sdp-training"),
        (["--pool=node"], "http://10.0.0.2:9100: Prometheus cannot scrape it: refused"),
    ],
)
def test_a_prometheus_has_the_releases_scrape_jobs_and_rules_and_reaches_its_targets(
    server: Server, arguments: list[str], says: str
) -> None:
    code, text = run(server.url, *arguments)
    if says:
        assert (code, says in text) == (1, True), text
    else:
        assert (code, text) == (0, "Prometheus has 1 scrape jobs of this release with 1 targets, none of them down")


def test_a_server_that_is_missing_or_something_else_fails_in_one_line(server: Server) -> None:
    server.answers = {path: ["else"] for path in server.answers}
    for url in (server.url, "http://127.0.0.1:9"):
        code, text = run(url, f"--pool={POOL}")
        assert (code, text.count("\n"), text.startswith(f"{url}: ")) == (1, 0, True), text
