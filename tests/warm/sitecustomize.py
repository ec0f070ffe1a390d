"""A worker that Ray starts is forked from the tests' process of tests/warm/workers.py, instead of a new interpreter.

On the PYTHONPATH of what integration tests start. What asks stays, as the raylet's child, for as long as its fork does.
Every Python process begins with this, so it imports next to nothing.
"""

import os
import sys


def ask(at: str) -> None:
    """Ask for a fork as this worker; if there is one, exit with its status when it exits, else return."""
    import json
    import socket

    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(at)
        asked = {"argv": sys.orig_argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109
        socket.send_fds(line, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
        status = line.recv(8)
    except OSError:
        return  # the server has gone
    os._exit(int(status or b"1"))


if len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith("/ray/_private/workers/default_worker.py"):
    _at = os.environ.get("SDP_TESTS_WARM_WORKERS", "")
    if os.path.exists(_at):  # noqa: PTH110
        ask(_at)
