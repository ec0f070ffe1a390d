"""Ends this process at once, with every process that it has started."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

cleanups: list[Callable[[], object]] = []
"""Functions to call before the process is ended at once, the newest first."""
seen = threading.Event()
"""Set once a handler of a signal has run: the main thread has time for signals."""
signals: list[str] = []
"""Names of the signals that were handled. Ray raises another KeyboardInterrupt in place of a handler's."""


def clean_up() -> None:
    """Call the cleanups, whatever some of them raise."""
    for cleanup in reversed(tuple(cleanups)):
        with suppress(Exception):
            cleanup()


def note_signal(number: int) -> str:
    """Record that a handler runs; return the signal's name."""
    seen.set()
    signals.append(signal.Signals(number).name)
    return signals[-1]


def raylet_command(pid: int) -> bytes:
    """Return the command line of a process if it is a raylet, else nothing."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
    return command if command.partition(b"\0")[0].endswith(b"raylet/raylet") else b""


def kill_descendants(meanwhile: Callable[[], None] = lambda: None, root: int | None = None) -> None:
    """Stop all processes below this one, or below `root`, call `meanwhile`, and kill them; without /proc, do nothing.

    Exit then. Ray's own shutdown waits for seconds, and where its raylet alone is killed, its agents stay for a minute.
    A raylet's death makes Ray's core end this process, so it is killed last.
    """
    stopped: list[int] = []
    # Stopped first, so that none starts another or acts on the end of the others.
    while started := [pid for pid in _descendants(root or os.getpid()) if pid not in stopped]:
        _send(signal.SIGSTOP, started)
        stopped += started
    with suppress(Exception):
        meanwhile()
    _send(signal.SIGKILL, sorted(stopped, key=lambda pid: bool(raylet_command(pid))))


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended, or it is another user's
            os.kill(pid, number)


def _descendants(root: int) -> list[int]:
    """Return the pids of all descendants, each after its parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # The name in parentheses may contain anything.
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return pids[1:]
