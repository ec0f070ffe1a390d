"""CPU time and memory of a command and all its descendants, sampled from /proc while it runs."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_S = 0.05
_MEMORY_EVERY = 10
"""Samples of CPU time for one of memory, which costs more."""


@dataclass
class Cost:
    """Resources used by all processes together."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """The highest sum of proportional set sizes: a page shared by two processes counts once."""
    code: int = 0
    by_name: dict[str, float] = field(default_factory=dict)
    """CPU seconds by the program's name."""


def run_and_measure(
    command: Sequence[str], *, timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Cost:
    """Run a command to its end, and return its cost. Processes that it leaves behind count too, and are then killed."""
    # Orphans become children of this process instead of init's, so that none is missed.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(_descendants(os.getpid()))
    seen: dict[tuple[int, str], tuple[str, float]] = {}
    cost = Cost()
    over = threading.Event()

    def watch() -> None:
        samples = 0
        while not over.wait(_SAMPLE_S):
            samples += 1
            tree = [pid for pid in _descendants(os.getpid()) if pid not in before]
            for pid in tree:
                _sample(pid, seen)
            if samples % _MEMORY_EVERY == 0:
                cost.peak_bytes = max(cost.peak_bytes, sum(map(_memory, tree)))

    watcher = threading.Thread(target=watch)
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=None if env is None else dict(env))
    watcher.start()
    try:
        cost.code = process.wait(timeout_s)
    finally:
        cost.seconds = time.monotonic() - began
        over.set()
        watcher.join()
        for pid in _descendants(os.getpid()):
            if pid not in before:
                _sample(pid, seen)
                _kill(pid)
        process.wait()
    for name, seconds in seen.values():
        cost.cpu_s += seconds
        cost.by_name[name] = cost.by_name.get(name, 0.0) + seconds
    return cost


def cpu_of_tree() -> float:
    """Return the CPU seconds of this process and all its descendants, including those that have ended."""
    stats = map(_stat, [os.getpid(), *_descendants(os.getpid())])
    return sum(int(ticks) for stat in stats for ticks in stat[11:15]) / _TICKS


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    descendants, ahead = [], [root]
    while ahead:
        for pid in children.get(ahead.pop(), []):
            descendants.append(pid)
            ahead.append(pid)
    return descendants


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _sample(pid: int, seen: dict[tuple[int, str], tuple[str, float]]) -> None:
    stat = _stat(pid)
    if stat:
        known = seen.get((pid, stat[19]), ("", 0.0))[0]
        seen[pid, stat[19]] = (_name(pid) or known, (int(stat[11]) + int(stat[12])) / _TICKS)


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    if len(words) > 2 and words[1] == "-m":
        return words[2]
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return Path(scripts[0] if scripts else words[0].split(" ")[0]).name


def _memory(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
