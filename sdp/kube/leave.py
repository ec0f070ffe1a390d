"""`python -m sdp.kube.leave SECONDS`: the preStop hook of the head's pod.

Drivers run on the head. The hook signals their supervisors; each stops its job, which writes a last checkpoint, but
stays alive itself, so that Ray still reports the job as running when the head ends. KubeRay submits a running job
again, and it continues from the checkpoint; it does not submit a job that has ended.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sdp.console import say

PROC = Path("/proc")
LEAVING = signal.SIGUSR1
"""The signal to a supervisor."""


def leave(seconds: float, is_supervisor: Callable[[Sequence[str]], bool] | None = None) -> list[int]:
    """Tell this pod's supervisors to stop their jobs, and wait; return the pids of those that are late."""
    deadline = time.monotonic() + seconds
    pids = [pid for pid in _processes() if (is_supervisor or supervises)(_words(pid))]
    for pid in pids:
        try:
            os.kill(pid, LEAVING)
        except ProcessLookupError:
            continue
    while (busy := [pid for pid in pids if _children(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return busy


def supervises(words: Sequence[str]) -> bool:
    """Return whether a command line is a supervisor's, rather than that of a shell that started one."""
    return list(words[1:3]) == ["-m", "sdp.supervisor"]


def _processes() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]


def _words(pid: int) -> list[str]:
    try:
        return [word.decode(errors="replace") for word in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")]
    except OSError:  # it has ended, or is another user's
        return []


def _children(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return []


def main(arguments: Sequence[str]) -> int:
    """Run the hook with the number of seconds it may take."""
    try:
        (word,) = arguments
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        say(f"leave: expected one number of seconds, got {' '.join(arguments) or 'nothing'}")
        return 2
    for pid in leave(seconds):
        say(f"leave: the job of the supervisor {pid} has not stopped within {seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
