"""Other processes: running commands, finding processes, and ports for servers."""

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def ended(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends, for two minutes at most; return its exit code and what it printed."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, **{"timeout": 120, "check": False, **options})


def printed(command: Sequence[object], **options: Any) -> str:
    """Run a command until it ends well; return what it printed."""
    done = ended(command, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def peak_bytes(pid: int | str = "self") -> int:
    """Return the most memory that a process has held, 0 of one that ends."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def processes_with(text: str | Path) -> list[int]:
    """Return the pids of the processes whose command line contains a text."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if os.fsencode(text) in entry.read_bytes():
                pids.append(int(entry.parent.name))
    return pids


def processes_with_variable(name: str, value: str | Path, text: str = "") -> list[int]:
    """Return the pids of the processes with a variable in their environment, and a text in their command line."""
    variable, pids = os.fsencode(f"{name}={value}"), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if variable in entry.read_bytes().split(b"\0") and text.encode() in (entry.parent / "cmdline").read_bytes():
                pids.append(int(entry.parent.name))
    return pids


def free_port() -> int:
    """Return a port that nothing listens on; another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
