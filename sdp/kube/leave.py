"""`python -m sdp.kube.leave SECONDS`: the preStop hook of the head's pod.

Drivers run on the head. The hook signals their supervisors; each stops its job, which writes a last checkpoint, but
stays alive itself, so that Ray still reports the job as running when the head ends. KubeRay submits a running job
again, and it continues from the checkpoint; it does not submit a job that has ended.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sdp.console import say

LEAVING = signal.SIGUSR1
"""The signal to a supervisor."""


def supervises(words: Sequence[str]) -> bool:
    """Return whether a command line is a supervisor's, rather than that of a shell that started one."""
    return list(words[1:3]) == ["-m", "sdp.supervisor"]


def leave(seconds: float, is_supervisor: Callable[[Sequence[str]], bool] = supervises) -> list[int]:
    """Tell this pod's supervisors to stop their jobs, and wait; return the pids of those that are late."""
    deadline = time.monotonic() + seconds
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    pids = [pid for pid in pids if is_supervisor(_read(pid, "cmdline").split("\0"))]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, LEAVING)
    while (busy := [pid for pid in pids if _read(pid, f"task/{pid}/children")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return busy


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""


if __name__ == "__main__":
    for late in leave(float(sys.argv[1])):
        say(f"leave: the job of the supervisor {late} has not stopped within {sys.argv[1]} s")
