"""A worker that Ray starts is forked from the tests' process of tests/warm/workers.py, instead of a new interpreter.

On the PYTHONPATH of what integration tests start. What asks stays, as the raylet's child, for as long as its fork does.
Every Python process begins with this, so it imports next to nothing.
"""

import os
import sys

_WORKER = "/ray/_private/workers/default_worker.py"
_SETUP = "/ray/_private/workers/setup_worker.py"
_SETTINGS = "--serialized-runtime-env-context="


def wanted(command: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return the arguments of the worker that a command becomes, and its additional environment; None if it is none.

    With a runtime environment Ray imports itself in setup_worker.py, only to replace that process by the worker.
    """
    arguments, added = command[1:], {}
    if arguments and arguments[0].endswith(_SETUP):
        import json
        import shlex

        (settings,) = [json.loads(each[len(_SETTINGS) :]) for each in arguments if each.startswith(_SETTINGS)] or [{}]
        added = settings.pop("env_vars", {})
        if settings.pop("py_executable", "") not in (sys.executable, shlex.quote(sys.executable)):
            return None
        if any(settings.values()) or "PYTHONPATH" in added or any("$" in value for value in added.values()):
            return None  # for Ray to do
        if "--language=PYTHON" not in arguments:
            return None
        arguments = [each for each in arguments[1:] if not each.startswith((_SETTINGS, "--language="))]
    return (arguments, added) if arguments and arguments[0].endswith(_WORKER) else None


def ask(at: str, arguments: list[str], added: dict[str, str]) -> None:
    """Ask for a fork as this worker; if there is one, exit with its status when it exits, else return."""
    import json
    import socket

    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(at)
        environment = {**os.environ, **added}
        asked = {"argv": arguments, "environment": environment, "folder": os.getcwd()}  # noqa: PTH109
        socket.send_fds(line, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
        status = line.recv(8)
    except OSError:
        return  # the server has gone
    os._exit(int(status or b"1"))


if len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith((_WORKER, _SETUP)):
    _at = os.environ.get("SDP_TESTS_WARM_WORKERS", "")
    if os.path.exists(_at) and (_wanted := wanted(sys.orig_argv)):  # noqa: PTH110
        ask(_at, *_wanted)
