"""`helm test`'s checks against a server that answers as Ray's head and Prometheus do."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sdp.kube import helm_test

TOKEN = "of-the-cluster"


class Server:
    """Answers by path; with a token, refuses all requests without it but those for its version."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.token = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = not outer.token or self.headers.get("Authorization") == f"Bearer {outer.token}"
                status = 200 if self.path in outer.answers else 404
                body = json.dumps(outer.answers.get(self.path)).encode()
                self.send_response(status if allowed else 401)
                self.end_headers()
                self.wfile.write(body if allowed else b"no token")

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


@pytest.fixture
def head(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A head with two living nodes, one that has gone, and one job."""
    nodes = [{"raylet": {"state": state}} for state in ("ALIVE", "ALIVE", "DEAD")] + [{"raylet": {}}]
    server.token = TOKEN
    server.answers = {
        "/api/version": {"ray_version": "2.60.0"},
        "/api/jobs/": [{"submission_id": "sdp-download"}],
        "/nodes?view=summary": {"result": True, "data": {"summary": nodes}},
    }
    monkeypatch.setenv(helm_test.TOKEN_ENV, TOKEN)
    return server


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = helm_test.main(arguments)
    return code, capsys.readouterr().err.strip()


def test_a_head_that_answers_passes_and_says_what_it_has(head: Server, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "cluster", head.url, "--ray-version", "2.60.0", "--nodes", "2")
    assert result == (0, "Ray 2.60.0 has 2 nodes and knows 1 jobs")


@pytest.mark.parametrize(
    ("version", "nodes", "says"),
    [
        ("2.59.0", "2", "rayVersion: expected the image's version, 2.60.0, got 2.59.0"),
        ("2.60.0", "3", "nodes: expected 3 or more, got 2"),
    ],
)
def test_a_head_of_another_version_or_with_too_few_nodes_fails(
    head: Server, capsys: pytest.CaptureFixture[str], version: str, nodes: str, says: str
) -> None:
    code, line = run(capsys, "cluster", head.url, "--ray-version", version, "--nodes", nodes)
    assert (code, line.startswith(says)) == (1, True), line


def test_a_head_that_answers_anybody_fails_where_a_token_should_be_needed(
    head: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    head.token = ""
    code, line = run(capsys, "cluster", head.url, "--ray-version", "2.60.0", "--nodes", "1")
    assert code == 1
    assert "answers without the token" in line


def test_a_head_without_a_token_passes_where_none_is_needed(
    head: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head.token = ""
    monkeypatch.delenv(helm_test.TOKEN_ENV)
    assert run(capsys, "cluster", head.url, "--ray-version", "2.60.0", "--nodes", "1")[0] == 0


@pytest.mark.parametrize("chart", [["cluster", "--ray-version", "2", "--nodes", "1"], ["monitoring", "--pool", "a"]])
def test_what_is_not_there_or_is_something_else_fails_in_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], chart: list[str]
) -> None:
    name, *rest = chart
    silent = "http://127.0.0.1:9"
    code, line = run(capsys, name, silent, *rest)
    assert (code, line.startswith(f"{silent}: ")) == (1, True)
    server.answers = {path: ["else"] for path in ("/api/version", "/api/v1/scrape_pools")}
    code, line = run(capsys, name, server.url, *rest)
    assert (code, line.count("\n"), line.startswith(server.url)) == (1, 0, True), line


POOL = "podMonitor/monitoring/sdp-exporter/0"


@pytest.fixture
def prometheus(server: Server) -> Server:
    target = {"scrapePool": POOL, "health": "up", "lastError": "", "scrapeUrl": "http://10.0.0.1:9850/metrics"}
    other = {"scrapePool": "node", "health": "down", "lastError": "refused", "scrapeUrl": "http://10.0.0.2:9100"}
    server.answers = {
        "/api/v1/scrape_pools": {"status": "success", "data": {"scrapePools": ["node", POOL]}},
        "/api/v1/rules": {"status": "success", "data": {"groups": [{"name": "sdp-gpu"}]}},
        "/api/v1/targets?state=active": {"status": "success", "data": {"activeTargets": [target, other]}},
    }
    return server


def test_a_prometheus_that_has_all_passes_whatever_others_targets_do(
    prometheus: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = run(capsys, "monitoring", prometheus.url, "--pool", POOL, "--group", "sdp-gpu")
    assert (code, line) == (0, "Prometheus has 1 scrape jobs of this release with 1 targets, none of them down")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pool", "podMonitor/monitoring/other/0"], "no scrape job podMonitor/monitoring/other/0"),
        (["--pool", POOL, "--group", "sdp-training"], "no rules sdp-training"),
        (["--pool", "node"], "http://10.0.0.2:9100: Prometheus cannot scrape it: refused"),
    ],
)
def test_a_prometheus_that_lacks_something_or_reaches_no_target_fails(
    prometheus: Server, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, line = run(capsys, "monitoring", prometheus.url, *arguments)
    assert code == 1
    assert says in line


def test_it_needs_no_more_than_the_exporter_s_image_has() -> None:
    import subprocess
    import sys

    hide = "import sys; sys.modules.update(dict.fromkeys(('yaml', 'pydantic', 'kubernetes', 'urllib3', 'ray')))"
    code = f"{hide}; import sdp.kube.helm_test"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
