"""The scripts of `helm test` against a server that answers as Ray's head and Prometheus do."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ended

CHARTS = Path(__file__).parents[2] / "charts"
TOKEN = "of-the-cluster"
POOL = "podMonitor/monitoring/sdp-exporter/0"
NODES = [{"raylet": {"state": state}} for state in ("ALIVE", "ALIVE", "DEAD")] + [{"raylet": {}}]
TARGETS = [
    {"scrapePool": POOL, "health": "up", "lastError": "", "scrapeUrl": "http://10.0.0.1:9850/metrics"},
    {"scrapePool": "node", "health": "down", "lastError": "refused", "scrapeUrl": "http://10.0.0.2:9100"},
]


class Server:
    """Answers by path; with a token, refuses all requests without it."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/api/version": {"ray_version": "2.60.0"},
            "/api/jobs/": [{"submission_id": "sdp-download"}],
            "/nodes?view=summary": {"result": True, "data": {"summary": NODES}},
            "/api/v1/scrape_pools": {"data": {"scrapePools": ["node", POOL]}},
            "/api/v1/rules": {"data": {"groups": [{"name": "sdp-gpu"}]}},
            "/api/v1/targets?state=active": {"data": {"activeTargets": TARGETS}},
        }
        self.token = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = not outer.token or self.headers.get("Authorization") == f"Bearer {outer.token}"
                self.send_response(401 if not allowed else 200 if self.path in outer.answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(outer.answers.get(self.path)).encode() if allowed else b"no token")

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


def run(chart: str, *arguments: str, token: str = "") -> tuple[int, str]:
    """Run a chart's test as its pod does, without any package; return its exit code and output."""
    code = (CHARTS / chart / "files" / "helm_test.py").read_text()
    command = [sys.executable, "-S", "-c", code, *arguments]
    environment = {"RAY_AUTH_TOKEN": token} if token else {}
    done = ended(command, env=environment)
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    ("version", "nodes", "required", "sent", "says"),
    [
        ("2.60.0", "2", TOKEN, TOKEN, ""),
        ("2.60.0", "2", "", "", ""),
        ("2.59.0", "2", TOKEN, TOKEN, "rayVersion: expected the image's version, 2.60.0, got 2.59.0"),
        ("2.60.0", "3", TOKEN, TOKEN, "nodes: expected 3 or more, got 2"),
        ("2.60.0", "1", "", TOKEN, "the head answers without the token"),
        ("2.60.0", "1", TOKEN, "another", "HTTP Error 401"),
    ],
)
def test_a_head_has_the_version_and_nodes_of_the_release_and_refuses_strangers(
    server: Server, version: str, nodes: str, required: str, sent: str, says: str
) -> None:
    server.token = required
    code, text = run("sdp-cluster", server.url, version, nodes, token=sent)
    if says:
        assert (code, says in text) == (1, True), text
    else:
        assert (code, text) == (0, "Ray 2.60.0 has 2 nodes")


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
    code, text = run("sdp-monitoring", server.url, *arguments)
    if says:
        assert (code, says in text) == (1, True), text
    else:
        assert (code, text) == (0, "Prometheus has 1 scrape jobs of this release with 1 targets, none of them down")


@pytest.mark.parametrize(
    ("chart", "arguments"), [("sdp-cluster", ("2.60.0", "1")), ("sdp-monitoring", (f"--pool={POOL}",))]
)
def test_a_server_that_is_missing_or_something_else_fails_in_one_line(
    server: Server, chart: str, arguments: tuple[str, ...]
) -> None:
    server.answers = {path: ["else"] for path in server.answers}
    for url in (server.url, "http://127.0.0.1:9"):
        code, text = run(chart, url, *arguments)
        assert (code, text.count("\n"), text.startswith(f"{url}: ")) == (1, 0, True), text
