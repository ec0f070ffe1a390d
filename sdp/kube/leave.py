"""`python -m sdp.kube.leave SECONDS`: what the head's pod does before it goes (its preStop).

Drivers live on the head. Their supervisors are told that the node goes; each stops its job, which makes a last
checkpoint, and then stays, so that Ray still calls the job running when the head ends: KubeRay submits such a job
again, and it continues from there. One that had ended would stay as it is.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sdp.console import say

PROC = Path("/proc")
LEAVING = signal.SIGUSR1
"""What tells a supervisor so."""


def leave(seconds: float, is_supervisor: Callable[[Sequence[str]], bool] | None = None) -> list[int]:
    """Have this pod's supervisors stop their jobs and wait until they have; returns those that had not in time."""
    deadline = time.monotonic() + seconds
    told = [pid for pid in _processes() if (is_supervisor or supervises)(_words(pid))]
    for pid in told:
        try:
            os.kill(pid, LEAVING)
        except ProcessLookupError:
            continue
    wait = threading.Event().wait
    while (busy := [pid for pid in told if _children(pid)]) and time.monotonic() < deadline:
        wait(0.1)
    return busy


def supervises(words: Sequence[str]) -> bool:
    """Whether a command line is a supervisor's own, not that of a shell which started one."""
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
    """Leave, within so many seconds."""
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
