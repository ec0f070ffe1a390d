"""The end of a process that does not wait for the rest of its code."""

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

cleanups: list[Callable[[], None]] = []
"""Functions to call before such an end, newest last."""


def kill_descendants() -> None:
    """Kill all processes below this one, its own children last; do nothing without /proc. End right after it.

    Ray's own shutdown waits for seconds, and where its raylet alone is killed, its agents stay for a minute. Ray's core
    ends a process that has lost its raylet, hence the order.
    """
    stopped: list[int] = []
    # Stopped first, so that none starts another or acts on the end of the others.
    while started := [pid for pid in _descendants() if pid not in stopped]:
        _send(signal.SIGSTOP, started)
        stopped += started
    _send(signal.SIGKILL, reversed(stopped))


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended, or it is another user's
            os.kill(pid, number)


def _descendants() -> list[int]:
    """Return the pids of all descendants, each after its parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # The name in parentheses may contain anything.
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = [os.getpid()]
    for pid in pids:
        pids += children.get(pid, [])
    return pids[1:]
