"""The supervisor: what it starts again, what it does not, and that it gives up."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sdp.supervisor import supervise

COUNTING = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write("x")
runs = os.path.getsize(sys.argv[1])
codes = [int(code) for code in sys.argv[2].split(",")]
code = codes[min(runs, len(codes)) - 1]
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def runs_of(tmp_path: Path, codes: str, **bounds: float) -> tuple[int, int]:
    """The exit code in the end, and how often a command was run that ends with these codes in turn."""
    tally = tmp_path / "tally"
    code = supervise([sys.executable, "-c", COUNTING, str(tally), codes], first_pause_s=0.01, **bounds)  # type: ignore[arg-type]
    return code, tally.stat().st_size


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
def test_a_breakdown_is_tried_again_and_what_a_person_has_to_mend_is_not(
    tmp_path: Path, codes: str, expected: tuple[int, int]
) -> None:
    assert runs_of(tmp_path, codes) == expected


def test_breakdowns_far_apart_are_not_held_against_a_job(tmp_path: Path) -> None:
    assert runs_of(tmp_path, "1,1,1,1,1,1,1,0", steady_s=0.0) == (0, 8)


def test_a_wish_to_stop_reaches_the_job_and_it_is_not_started_again(tmp_path: Path) -> None:
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    job = (
        "import pathlib, signal, sys, threading\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(stopped)!r}).touch(), sys.exit(1)))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "threading.Event().wait(60)\n"
    )
    program = f"import sys; from sdp.supervisor import supervise; sys.exit(supervise([sys.executable, '-c', {job!r}]))"
    supervisor = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    until = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < until
        threading.Event().wait(0.01)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(30) == 1
    assert stopped.exists()


def test_a_wish_to_stop_while_the_job_is_being_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def told_meanwhile(command: list[str]) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(command)

    monkeypatch.setattr(subprocess, "Popen", told_meanwhile)
    began = time.monotonic()
    assert supervise([sys.executable, "-c", "import time; time.sleep(100)"]) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60
