"""Ctrl-C and SIGTERM, sent to real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sdp.config import dump_yaml
from sdp.storage import open_storage
from sdp.train.run_folder import RunFolder
from tests.programs import ROOT, ended, processes_with_variable
from tests.training import config, tiny_inputs, when
from tests.waiting import until


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_inputs(tmp_path_factory.mktemp("stopping"))


@pytest.mark.parametrize(
    ("number", "more"), [(signal.SIGINT, {"RAY_ADDRESS": "local"}), (signal.SIGTERM, {})], ids=["on Ray", "here"]
)
def test_training_that_is_stopped_leaves_a_checkpoint_and_does_not_exit_with_0(
    inputs: Path, tmp_path: Path, number: signal.Signals, more: dict[str, str]
) -> None:
    job = tmp_path / "train.yaml"
    how = config(inputs, output__uri=str(tmp_path / "run"), max_steps=100_000)
    job.write_text(dump_yaml(how))
    words = ["train", "--config", str(job)]
    folder = RunFolder(open_storage(str(tmp_path / "run")))
    with subprocess.Popen(
        [sys.executable, "-m", "sdp", *words],
        cwd=ROOT,
        env={**os.environ, **more},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        when(folder, "training", lambda _: process.send_signal(number))
        _, err = process.communicate(timeout=400)
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1] == f"sdp: stopped by {number.name}; the same command continues where it stopped"
    assert err.count("stopped by") == 1
    assert "Traceback" not in err
    assert folder.newest() is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_says_so_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "config.yaml"
    os.mkfifo(fifo)
    words = [sys.executable, "-m", "sdp", "download", "--config", str(fifo)]
    with (
        subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process,
        fifo.open("w"),  # opens when the command reads its configuration, and keeps it waiting for the rest
    ):
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == f"sdp: stopped by {number.name}; the same command continues where it stopped\n"


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that finds a module `compiled`, which is like PyTorch's.

    A signal comes while it is imported, and it aborts the process if an exception reaches it.
    """
    (tmp_path / "compiled.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept KeyboardInterrupt:\n    os.abort()\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}


@pytest.mark.parametrize("action", ["import compiled", "threading.Event().wait()"])
def test_a_cleanup_that_waits_for_ever_does_not_keep_a_stopped_command(library: dict[str, str], action: str) -> None:
    code = f"""
import os, signal, sys, threading
from sdp import cli, leaving
from sdp.cli.command import LOOK, Command

def run(_):
    leaving.cleanups.append(threading.Event().wait)
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    try:
        {action}
    finally:
        threading.Event().wait()

cli._UNWIND_S = 0.3
sys.argv = ["sdp", "look"]
sys.exit(cli.main(commands=[Command("look", LOOK, "Look.", lambda _: None, run)]))
"""
    done = ended([sys.executable, "-c", code], env=library, timeout=30)
    assert (done.returncode, done.stderr) == (143, "sdp: stopped by SIGTERM; run it again\n")


COMMAND = """
import ctypes, os, signal, sys
from sdp import cli
from sdp.ray import cluster
from sdp.cli.command import LOOK, Command
from sdp.lease import Lease
from sdp.storage import open_storage

def run(_):
    with Lease.acquire(open_storage(sys.argv[2])), cluster._captured_stderr():
        {action}

sys.argv[0] = "sdp"
sys.exit(cli.main(commands=[Command("look", LOOK, "Look.", lambda parser: parser.add_argument("output"), run)]))
"""
DEADLOCK = """
        lock = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
        os.kill(os.getpid(), signal.SIGTERM)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a lock of Linux's C library")
@pytest.mark.parametrize("action", ["import compiled", DEADLOCK])
def test_a_signal_inside_a_library_s_code_is_one_line_and_releases_the_lease(
    library: dict[str, str], tmp_path: Path, action: str
) -> None:
    command = [sys.executable, "-c", COMMAND.format(action=action), "look", str(tmp_path / "out")]
    done = ended(command, env=library)
    assert (done.returncode, done.stderr) == (143, "sdp: stopped by SIGTERM; run it again\n")
    (record,) = (tmp_path / "out/_lease").iterdir()
    assert '"released":true' in record.read_text().replace(" ", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("state", ["starts", "works"])
def test_a_command_that_is_stopped_leaves_no_process_of_its_ray(tmp_path: Path, state: str) -> None:
    connected = tmp_path / "connected"
    action = f"cluster.connect(num_cpus=1); open({str(connected)!r}, 'w').close(); signal.pause()"
    command = [sys.executable, "-c", COMMAND.format(action=action), "look", str(tmp_path / "out")]
    environment = {**os.environ, "SDP_TEST_MARK": str(tmp_path)}

    def started() -> bool:
        return bool(processes_with_variable("SDP_TEST_MARK", tmp_path, "raylet/raylet"))

    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        until(started if state == "starts" else connected.exists, f"Ray {state}")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "sdp: stopped by SIGINT; run it again\n")
    # Ray's agents stay for a minute after a raylet that is killed alone.
    until(lambda: not processes_with_variable("SDP_TEST_MARK", tmp_path), "all have ended", 10)


def test_a_process_ends_without_taking_its_modules_apart() -> None:
    code = """
import atexit, sys
from sdp import cli
from sdp.cli.command import LOOK, Command

class Loud:
    def __del__(self):
        print("taken apart", flush=True)

def run(_):
    sys.kept = Loud()
    atexit.register(print, "cleaned up")
    return 1

sys.argv = ["sdp", "look"]
sys.exit(cli.main(commands=[Command("look", LOOK, "Look.", lambda _: None, run)]))
"""
    done = ended([sys.executable, "-c", code], cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "cleaned up\n")
