"""Other processes: running Python code, finding processes, and ports for servers."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_program(code: str, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run Python code from the repository's root, with one OpenMP thread."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
        check=False,
    )


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
