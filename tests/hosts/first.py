"""The first process of a host: it names the host, gives it a /tmp/ray of its own, and reaps what others leave.

It ends when its input does, so with the test that made the host; the kernel then ends the host's other processes.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

RAY = Path("/tmp/ray")


def main(name: str, folder: Path) -> None:
    """Prepare the host, leave a note in its folder, and reap children for ever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    socket.sethostname(name)
    RAY.mkdir(parents=True, exist_ok=True)
    for mount in (
        ["-t", "tmpfs", "tmpfs", str(RAY)],
        ["-t", "sysfs", "sysfs", str(folder / "sys")],
        ["--bind", str(folder / "hosts"), "/etc/hosts"],
    ):
        subprocess.run(["mount", *mount], check=True)
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    (folder / "ready").touch()
    while True:
        signal.sigwait({signal.SIGCHLD})
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _end_with_the_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
