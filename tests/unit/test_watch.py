"""The page of a run under way: what it shows, to whom, and what a request may cost."""

import http.client
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sdp.cli import main
from sdp.errors import StorageError
from sdp.report import watch
from sdp.report.watch import WatchServer
from sdp.storage import open_storage
from sdp.storage.local import LocalStorage
from tests.kit import make_images, raising
from tests.unit.test_inspect_run import make_run, publish, publish_lines
from tests.unit.test_report import picture

Serve = Callable[[Path], WatchServer]
LINE = {
    "step": 9, "samples": 72, "epoch": 1, "epoch_done": 0.8, "loss": 0.3, "loss_smoothed": 0.25, "samples_per_s": 90.0,
    "workers": 2, "seconds": 80.0, "left_s": 65.0, "memory_peak": 8e9, "validation": {"all": 0.5}, "validation_step": 8,
}  # fmt: skip


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves the page of a run on a free port."""
    with ExitStack() as ends:

        def start(run: Path) -> WatchServer:
            server = ends.enter_context(WatchServer(str(run), 0))
            Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            ends.callback(server.shutdown)
            return server

        yield start


def ask(server: WatchServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def add_samples(run: Path, step: int, prompt: str = "a cat") -> None:
    folder = open_storage(str(run)).child(f"samples/step-{step:09d}")
    folder.publish("000.png", picture("red", side=step))
    publish(folder, "prompts.json", {"000.png": prompt})


def test_the_page_has_the_newest_pictures_first_and_how_training_goes(tmp_path: Path, serve: Serve) -> None:
    run = make_run(tmp_path)
    publish_lines(run, "metrics/000002-000000008.jsonl", [LINE])
    for step in (3, 6):
        add_samples(tmp_path / "run", step, "<script>a cat</script>")
    status, headers, content = ask(serve(tmp_path / "run"))
    text = content.decode()
    assert (status, headers["Refresh"]) == (200, "10")
    first, later = text.split("<h3>Drawn during training</h3>")
    assert re.findall(r'src="([^"]*)"', first) == ["samples/step-000000006/000.png"]
    assert re.findall(r'href="(samples[^"]*)"', later) == [
        "samples/step-000000006/000.png", "samples/step-000000003/000.png",
    ]  # fmt: skip
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))
    expected = {"step": "9", "loss": "0.2500", "loss on held-out rows": "0.5000", "img/s": "90", "GPU memory": "8.0 GB"}
    assert figures.items() >= expected.items()
    assert "time left" not in figures, "nobody trains"
    assert "<script" not in text


def test_the_page_follows_a_run_and_says_when_it_cannot_be_read(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    server = serve(tmp_path / "run")
    assert b"At step 8" in ask(server)[2]
    publish_lines(run, "metrics/000002-000000008.jsonl", [LINE])
    assert b"At step 8" in ask(server)[2], "requests of some seconds share a page"
    server._until = 0.0  # later
    assert b"At step 9" in ask(server)[2]
    monkeypatch.setattr(LocalStorage, "names", raising(StorageError("the store is away")))
    server._until = 0.0
    status, headers, content = ask(server)
    assert (status, headers["Refresh"]) == (200, "10"), "it tries again"
    assert b"Cannot be read: the store is away" in content


def test_the_phase_under_way_comes_first_with_its_own_pictures(tmp_path: Path, serve: Serve) -> None:
    for phase in ("phase-1", "phase-2"):
        make_run(tmp_path, f"run/{phase}")
        add_samples(tmp_path / "run" / phase, 3)
    server = serve(tmp_path / "run")
    text = ask(server)[2].decode()
    assert re.findall(r"<h2>([^<]*)</h2>", text) == ["Training, phase 2", "Training, phase 1"]
    for link in re.findall(r'src="([^"]*)"', text):
        assert ask(server, f"/{link}")[::2] == (200, picture("red", side=3))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", ""])
def test_a_name_that_points_at_this_machine_reads_nothing(tmp_path: Path, serve: Serve, host: str) -> None:
    make_run(tmp_path)
    add_samples(tmp_path / "run", 3)
    server = serve(tmp_path / "run")
    for path in ("/", "/samples/step-000000003/000.png"):
        status, _, content = ask(server, path, Host=host)
        assert (status, content) == (403, f"open {server.link} on this machine\n".encode())
        for own in ("localhost", "localhost:9000", "[::1]:8100", "127.0.0.1"):
            assert ask(server, path, Host=own)[0] == 200, "a forwarded port may be another"


def test_no_page_of_another_origin_may_read_or_frame_it(tmp_path: Path, serve: Serve) -> None:
    make_run(tmp_path)
    _, headers, _ = ask(serve(tmp_path / "run"), Origin="https://evil.example")
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(headers["Content-Security-Policy"].split("; "))


@pytest.mark.parametrize(
    "path",
    [
        "/_run.json", "/events.jsonl", "/samples/step-000000003/prompts.json", "/samples/step-000000003/001.png",
        "/samples/step-000000003/../../_run.json", "/../outside/000.png", "/samples/../samples/step-000000003/000.png",
        "/phase-3/samples/step-000000003/000.png", "/%5frun.json",
    ],
)  # fmt: skip
def test_nothing_but_the_page_and_pictures_is_served(tmp_path: Path, serve: Serve, path: str) -> None:
    make_run(tmp_path)
    add_samples(tmp_path / "run", 3)
    server = serve(tmp_path / "run")
    assert ask(server, path)[0] == 404
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, method=method)[0] == 501
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_a_slow_client_ends_and_holds_nobody_up(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.setattr(watch, "_REQUESTS", 3)
    server = serve(tmp_path / "run")
    with ExitStack() as ends:
        slow = [ends.enter_context(socket.create_connection(server.server_address[:2], 20)) for _ in range(3)]
        for client in slow:
            client.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert [ask(server)[0] for _ in range(3)] == [200] * 3
        assert [client.recv(1) for client in slow] == [b""] * 3, "newer requests have ended them"
        monkeypatch.setattr(watch._Request, "timeout", 0.05)
        silent = ends.enter_context(socket.create_connection(server.server_address[:2], 20))
        assert silent.recv(1) == b""


def test_a_hundred_clients_at_once_need_not_try_again(tmp_path: Path) -> None:
    make_run(tmp_path)
    with WatchServer(str(tmp_path / "run"), 0) as server, ExitStack() as ends:
        for _ in range(100):  # and nobody accepts them
            ends.enter_context(socket.create_connection(server.server_address[:2], 0.9))


def test_a_page_of_a_long_run_reads_few_files(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = make_run(tmp_path), list[str]()
    for number in range(2, 40):
        publish_lines(run, f"metrics/{number:06d}-{number * 10:09d}.jsonl", [{**LINE, "step": number * 10 + 1}])
        publish_lines(run, f"bad_rows/step-{number:09d}.jsonl", [{"row": 1, "reason": "undecodable"}])
        add_samples(tmp_path / "run", number)
    original = LocalStorage.read
    monkeypatch.setattr(LocalStorage, "read", lambda self, path: (read.append(path), original(self, path))[1])
    assert ask(serve(tmp_path / "run"))[0] == 200
    folders = [path.partition("/")[0] for path in read]
    assert (folders.count("metrics"), folders.count("samples"), len(read) <= 12) == (4, 6, True)


def test_what_cannot_be_watched_is_refused_in_one_line(
    tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path)
    make_run(tmp_path)
    images, run = str(tmp_path / "images"), str(tmp_path / "run")
    busy = str(serve(tmp_path / "run").server_address[1])
    for words, message in (
        ([images], f"--watch: expected a training run, got the dataset {images}; leave --watch out"),
        ([run, images], "--watch: expected one training run and no --out"),
        ([run, "--out", "r.html"], "--watch: expected one training run and no --out"),
        ([run, "--port", busy], f"--port: {busy} cannot be used"),
        ([run, "--port", "70000"], "--port: 70000 cannot be used"),
    ):
        assert main(["report", *words, "--watch"]) == 2
        assert message in capsys.readouterr().err
