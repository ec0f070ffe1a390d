"""The supervisor: what it starts again, what it does not, and that it gives up."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdp import supervisor
from sdp.console import SUBMITTED_ENV
from sdp.kube import mounted as kube_mounted
from sdp.kube.leave import LEAVING, leave, supervises
from sdp.supervisor import supervise
from tests.kit import write_files
from tests.kube_server import CORE, NAMESPACE, KubeServer
from tests.waiting import until

COUNTING = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write("x")
runs = os.path.getsize(sys.argv[1])
codes = [int(code) for code in sys.argv[2].split(",")]
code = codes[min(runs, len(codes)) - 1]
assert os.environ.get("SDP_RESTARTED") == ("1" if runs > 1 else None)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def runs_of(tmp_path: Path, codes: str, steady_s: float = supervisor.STEADY_S) -> tuple[int, int]:
    """The exit code in the end, and how often a command was run that ends with these codes in turn."""
    tally = tmp_path / "tally"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
        patch.setattr(supervisor, "STEADY_S", steady_s)
        code = supervise([sys.executable, "-c", COUNTING, str(tally), codes])
    return code, tally.stat().st_size


def job_that_stops(ready: Path, stopped: Path, code: int) -> str:
    """Return a program that runs until it is stopped; files show its start and its end."""
    return (
        "import pathlib, signal, sys, threading\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(stopped)!r}).touch(), sys.exit({code})))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "threading.Event().wait(60)\n"
    )


def supervising(job: str) -> str:
    """A program that supervises a program."""
    return f"import sys; from sdp.supervisor import supervise; sys.exit(supervise([sys.executable, '-c', {job!r}]))"


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and kill it in the end."""
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ("0", (0, 1)),
        ("2", (2, 1)),
        ("1,0", (0, 2)),
        ("-9,1,0", (0, 3)),
        ("1,2", (2, 2)),
        ("1", (1, 5)),
        ("-11", (139, 5)),
    ],
)
def test_a_failed_job_is_restarted_unless_the_user_must_fix_it(
    tmp_path: Path, codes: str, expected: tuple[int, int]
) -> None:
    assert runs_of(tmp_path, codes) == expected


def test_failures_far_apart_are_not_counted_together(tmp_path: Path) -> None:
    assert runs_of(tmp_path, "1,1,1,1,1,1,1,0", steady_s=0.0) == (0, 8)


def test_a_stop_signal_reaches_the_job_which_is_not_restarted(tmp_path: Path) -> None:
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    with running(supervising(job_that_stops(ready, stopped, 1))) as supervisor:
        until(ready.exists, "the job has begun", 30)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == 1
    assert stopped.exists()


def test_a_stop_signal_during_the_start_reaches_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def reported_during(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", reported_during)
    began = time.monotonic()
    assert supervise([sys.executable, "-c", "import time; time.sleep(100)"]) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60


def test_a_supervisor_whose_pod_goes_stops_its_job_and_stays_itself(tmp_path: Path) -> None:
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    program = supervising(job_that_stops(ready, saved, 0))
    with running(program) as supervisor:
        until(ready.exists, "the job has begun", 30)
        assert leave(30, lambda words: program in words) == []
        assert saved.exists()
        assert "will be resubmitted on the next head" in next_line(supervisor)
        assert supervisor.poll() is None


def test_a_supervisor_whose_pod_goes_between_two_tries_stays_too() -> None:
    program = "from sdp import supervisor; supervisor.FIRST_PAUSE_S = 60; supervisor.supervise(['false'])"
    with running(program) as supervisor:
        assert "restarting in 60 s" in next_line(supervisor)
        assert leave(30, lambda words: program in words) == []
        assert "will be resubmitted on the next head" in next_line(supervisor)
        assert supervisor.poll() is None


def test_leaving_does_not_wait_for_ever_for_a_job_that_does_not_stop(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import pathlib, signal, subprocess\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "try: child.wait()\n"
        "finally: child.kill()\n"
    )
    with running(program) as supervisor:
        until(ready.exists, "the job has begun", 30)
        assert leave(0.2, lambda words: program in words) == [supervisor.pid]
        supervisor.send_signal(signal.SIGINT)
        supervisor.wait(30)


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        (["/opt/sdp/bin/python", "-m", "sdp.supervisor", "train", "--config", "train.yaml"], True),
        (["/bin/sh", "-c", "python -m sdp.supervisor train"], False),
        (["python", "-m", "sdp", "train"], False),
        (["python", "-m", "sdp.kube.leave", "280"], False),
        ([], False),
    ],
)
def test_a_supervisor_is_known_by_its_command_line(line: list[str], is_one: bool) -> None:
    assert supervises(line) is is_one


def test_the_ends_of_logs_are_saved_to_the_output_after_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, config, log = tmp_path / "run", tmp_path / "train.yaml", tmp_path / "job-driver-sdp-train-zz9.log"
    config.write_text(f"source: {{uri: s3://b/latents}}\noutput: {{uri: {output}}}\nmodel: {{source: builtin:tiny}}\n")
    log.write_bytes(b"x" * supervisor.LOG_BYTES + b"the end")
    monkeypatch.setattr(supervisor.internals, "crashed_workers", lambda _: [("worker-1", b"Segmentation fault")])
    assert supervise(["true"], partial(supervisor.save_logs, ["train", "--config", str(config)], log, 0.0)) == 0
    saved = output / "_logs" / "sdp-train-zz9"
    assert (saved / "driver.log").read_bytes() == b"x" * (supervisor.LOG_BYTES - 7) + b"the end"
    assert (saved / "worker-1.log").read_bytes() == b"Segmentation fault"


def process_of(source: Path, folder: Path) -> str:
    """Write the configuration of a job that reads a source; return its file."""
    text = f"source: {{uri: {source}}}\noutput: {{uri: {folder / 'out'}}}\nmodel: {{source: builtin:tiny}}\n"
    return str(write_files(folder, {"process.yaml": text}) / "process.yaml")


def test_a_job_that_waits_for_its_input_starts_when_that_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, manifest = tmp_path / "images", tmp_path / "images/_manifest.json"
    complete_at_start: list[bool] = []
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    monkeypatch.setattr(supervisor, "supervise", lambda *_: complete_at_start.append(manifest.exists()) or 0)
    config = process_of(tmp_path / "other", tmp_path)
    words = ["--wait-for-input", "process", "--config", config, "--set", f"source.uri={images}"]
    job = threading.Thread(target=supervisor.main, args=(words,))
    job.start()
    until(lambda: f"for {images} to be complete" in capsys.readouterr().err, "the line that says what it waits for")
    assert not complete_at_start
    write_files(images, {manifest.name: "{}"})
    job.join(60)
    assert complete_at_start == [True]


def test_a_jobs_hints_name_the_command_that_submits_it_to_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUBMITTED_ENV, "")
    seen: list[str] = []
    monkeypatch.setattr(supervisor, "supervise", lambda *_: seen.append(os.environ[SUBMITTED_ENV]) or 0)
    words = ["download", "--config", "/etc/sdp/jobs/download-more.yaml", "--set", "limit=5 "]
    assert supervisor.main(words) == 0
    monkeypatch.setenv(SUBMITTED_ENV, "sdp submit download-more --own-cluster")
    assert supervisor.main(words) == 0
    assert seen == ["sdp submit download-more --set 'limit=5 '", "sdp submit download-more --own-cluster"]


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KubeServer, Path]]:
    """Yield an API server with the ConfigMap `lab`, and the file of an older one in a head's pod."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # which is not for the API server
    reader, kube = tmp_path / "reader", KubeServer()
    kube.put(f"{CORE}/configmaps/lab", {"data": {"download.yaml": "limit: 2\n"}})
    files = {"jobs": "lab", "token": kube.token, "namespace": NAMESPACE, "ca.crt": kube.authority}
    monkeypatch.setattr(kube_mounted, "SERVER", f"https://127.0.0.1:{kube.port}")
    file = write_files(tmp_path / "jobs", {"download.yaml": "limit: 1\n"}) / "download.yaml"
    monkeypatch.setattr(kube_mounted, "JOBS_FOLDER", str(file.parent))
    monkeypatch.setattr(kube_mounted, "READER", write_files(reader, files))
    monkeypatch.setattr(kube_mounted, "ASK_S", 0.01)
    monkeypatch.setattr(supervisor, "supervise", lambda *_: int(file.read_text()[-2]) if file.exists() else 0)
    yield kube, file
    kube.close()


def end_of(file: Path) -> int:
    """Supervise a file's job to its end, and return its exit code."""
    return supervisor.main(["download", "--config", str(file)])


def test_a_job_waits_for_the_configuration_that_the_pod_does_not_have_yet(mounted: tuple[KubeServer, Path]) -> None:
    kube, file = mounted
    ends: list[int] = []
    job = threading.Thread(target=lambda: ends.append(end_of(file)))
    job.start()
    until(lambda: kube.asked("GET", "configmaps") > 2, "a third look")
    kube.fault("GET", "configmaps", 503, times=5)  # the API server is replaced meanwhile
    until(lambda: kube.asked("GET", "configmaps") > 12, "looks after that")
    assert not ends
    file.write_text("limit: 2\n")
    job.join(60)
    assert ends == [2]


def test_a_file_that_the_config_map_does_not_have_is_left_to_the_job(mounted: tuple[KubeServer, Path]) -> None:
    kube, file = mounted
    kube.put(f"{CORE}/configmaps/lab", {})
    file.unlink()
    assert end_of(file) == 0


def test_a_configuration_that_is_never_renewed_ends_the_job(
    mounted: tuple[KubeServer, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kube_mounted, "RENEWED_S", 0.1)
    _, file = mounted
    assert end_of(file) == 1
    assert f"{file} is older than its ConfigMap, and its node does not renew it" in capsys.readouterr().err


@pytest.mark.parametrize("without", ["rights", "token"])
def test_a_job_that_may_not_ask_for_its_configuration_runs(
    mounted: tuple[KubeServer, Path], capsys: pytest.CaptureFixture[str], without: str
) -> None:
    kube, file = mounted
    if without == "rights":
        kube.denied.add(("get", "configmaps"))
    else:
        (kube_mounted.READER / "token").unlink()
    assert end_of(file) == 1
    says = f"{file} may be older than the chart's release (the API server: HTTP Error 403"
    assert (says in capsys.readouterr().err) == (without == "rights")


def test_a_head_that_leaves_does_not_end_a_waiting_job(tmp_path: Path) -> None:
    config = process_of(tmp_path / "in", tmp_path)
    words = ["-m", "sdp.supervisor", "--wait-for-input", "process", "--config", config]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE) as process:
        try:
            assert "process is waiting: for" in next_line(process)
            process.send_signal(LEAVING)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        finally:
            process.kill()
