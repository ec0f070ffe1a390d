"""Fork what the tests start from the process of tests/warm/workers.py, instead of a new interpreter.

That is Ray's workers and agents, and, where SDP_TESTS_WARM_PROGRAMS is set, each `python -m NAME` and `sdp`. On the
PYTHONPATH of what integration tests start. What asks stays, as its parent's child, for as long as its fork does. Every
Python process begins with this, so it imports next to nothing.
"""

import os
import sys

_WORKER = "/ray/_private/workers/default_worker.py"
_SETUP = "/ray/_private/workers/setup_worker.py"
_SETTINGS = "--serialized-runtime-env-context="
_SCRIPTS = (
    _WORKER,
    "/ray/_private/log_monitor.py",
    "/ray/_private/runtime_env/agent/main.py",
    "/ray/autoscaler/_private/monitor.py",
    "/ray/dashboard/agent.py",
    "/ray/dashboard/dashboard.py",
)


def wanted(command: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return the arguments that a process of Ray's has in the end, and its additional environment; None for others.

    With a runtime environment Ray imports itself in setup_worker.py, only to replace that process by the worker.
    """
    arguments, added = command[2:] if command[1:2] == ["-u"] else command[1:], {}
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
    if arguments and arguments[0].endswith(_SCRIPTS):
        # Beside another Ray, an agent would try for three seconds to get the other one's port.
        return ["--listen-port=0" if each.startswith("--listen-port=") else each for each in arguments], added
    if arguments and arguments[0].endswith("/bin/sdp"):
        arguments[:1] = ["-m", "sdp"]
    return (arguments, added) if arguments[:1] == ["-m"] and "SDP_TESTS_WARM_PROGRAMS" in os.environ else None


def ask(at: str, arguments: list[str], added: dict[str, str]) -> None:
    """Ask for a fork as this process; if there is one, exit with its status when it exits, else return."""
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


_at = os.environ.get("SDP_TESTS_WARM_WORKERS", "")
if _at and (_wanted := wanted(sys.orig_argv)) and os.path.exists(_at):  # noqa: PTH110
    ask(_at, *_wanted)
