"""The fixture `warm_workers` replaces the processes that Ray starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import ended
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")

WORKER = """
import atexit, json, os, sys, time
import sdp.storage.retry
told = [os.getpid(), "torch" in sys.modules, sys.argv, os.environ["GIVEN"], os.getcwd(), __name__]
told.append([sdp.storage.retry._in_worker, "RAY_RAYLET_PID" in os.environ])
print(json.dumps(told), flush=True)
atexit.register(lambda: print("told", file=sys.stderr))
sys.stdout.reconfigure(errors="backslashreplace")
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Starts what Ray would take for a worker, which sleeps for so long."""
    script = tmp_path / "ray" / "_private" / "workers" / "default_worker.py"
    script.parent.mkdir(parents=True)
    script.write_text(WORKER)

    def started(seconds: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), "--worker", seconds]
        environment = {**os.environ, "GIVEN": "by the raylet"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)

    return started


def test_a_fork_has_the_libraries_and_otherwise_equals_a_new_process(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    asking = start("0")
    output, errors = asking.communicate(timeout=60)
    pid, has_torch, arguments, inherited, folder, name, worker = json.loads(output)
    assert asking.returncode == 7
    assert (has_torch, inherited, folder, name) == (True, "by the raylet", str(tmp_path), "__main__")
    assert arguments[1:] == ["--worker", "0"]
    assert worker == [True, False]  # sdp as it is in a worker, and the environment as it was given
    assert errors.startswith("told\n")
    assert pid != asking.pid


def test_each_ends_with_the_other(start: Callable[[str], subprocess.Popen[str]]) -> None:
    for victim in ("fork", "asker"):
        asking = start("600")
        assert asking.stdout is not None
        pid = json.loads(asking.stdout.readline())[0]
        os.kill(pid if victim == "fork" else asking.pid, signal.SIGKILL)
        assert asking.wait(60) == (128 + signal.SIGKILL if victim == "fork" else -signal.SIGKILL)
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the other has ended", 60)  # type: ignore[misc]
        asking.communicate()


@pytest.mark.parametrize(
    ("changes", "forked"),
    [({}, True), ({"env_vars": {"GIVEN": "${HOME}"}}, False), ({"command_prefix": ["nice"]}, False)],
    ids=["plain", "a variable to expand", "a prefix"],
)
def test_a_worker_with_an_environment_is_forked_unless_ray_has_to_prepare_it(
    tmp_path: Path, changes: dict[str, object], forked: bool
) -> None:
    folder = tmp_path / "ray" / "_private" / "workers"
    folder.mkdir(parents=True)
    (folder / "default_worker.py").write_text(WORKER)
    (folder / "setup_worker.py").write_text("print('prepared by Ray')")
    usual = {"command_prefix": [], "env_vars": {"GIVEN": "by the job"}, "py_executable": sys.executable}
    settings = json.dumps({**usual, "override_worker_entrypoint": None, "java_jars": [], **changes})
    done = ended([sys.executable, str(folder / "setup_worker.py"), str(folder / "default_worker.py"), "--worker", "0",
         f"--serialized-runtime-env-context={settings}", "--language=PYTHON"])  # fmt: skip
    if not forked:
        assert done.stdout == "prepared by Ray\n"
        return
    _, has_torch, arguments, variable, *_ = json.loads(done.stdout)
    assert (has_torch, variable, arguments[1:]) == (True, "by the job", ["--worker", "0"])
    assert done.returncode == 7


@pytest.mark.parametrize("forked", [True, False])
def test_a_program_is_forked_where_that_is_asked_for(tmp_path: Path, forked: bool) -> None:
    (tmp_path / "told.py").write_text(WORKER)
    environment = {**os.environ, "GIVEN": "by a test", **({"SDP_TESTS_WARM_PROGRAMS": "1"} if forked else {})}
    command = [sys.executable, "-m", "told", "--worker", "0"]
    done = ended(command, cwd=tmp_path, env=environment)
    _, has_torch, arguments, variable, folder, name, worker = json.loads(done.stdout)
    assert (done.returncode, has_torch) == (7, forked)
    assert arguments == [str(tmp_path / "told.py"), "--worker", "0"]
    assert (variable, folder, name) == ("by a test", str(tmp_path), "__main__")
    assert worker == [False, False]  # none of Ray's
    assert done.stderr == "told\n"
