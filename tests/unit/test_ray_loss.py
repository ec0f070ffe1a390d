"""A driver that loses Ray says one line, whatever ends it."""

import errno
import signal
import sys
from pathlib import Path

import pytest

from sdp.errors import SdpError
from sdp.ray.lost import explained, reason_of
from tests.programs import ended

DRIVER = """
import os, pathlib, signal, socket, subprocess, sys, threading, types

raylet = subprocess.Popen(
    [{program!r}, "-c", "import sys; sys.stdin.read()", "the-socket"],
    executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
gcs = socket.create_server(("127.0.0.1", 0))
ray = types.ModuleType("ray")
context = types.SimpleNamespace(
    get_node_id=lambda: "n", gcs_address="127.0.0.1:%d" % gcs.getsockname()[1]
)
ray.get_runtime_context = lambda: context
ray.nodes = lambda: [{{"NodeID": "n", "RayletSocketName": "the-socket"}}]
worker = types.ModuleType("ray._private.worker")
worker.print_to_stdstream = print
sys.modules.update({{"ray": ray, "ray._private": types.ModuleType("ray._private"), "ray._private.worker": worker}})
sys.modules["ray._private"].worker = worker

from sdp.ray import cluster, lost

lost._LOOK_S = 0.1
try:
    with lost.explained("an earlier job"):
        lost.watch(local="RAY_ADDRESS" not in os.environ, give_up=cluster.give_up)
    while any(thread.name == "sdp-ray-loss" for thread in threading.enumerate()):
        threading.Event().wait(0.01)
    links = [link for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not any("pidfd" in os.readlink(link) for link in links)
    stats = [stat.read_text().rpartition(")")[2].split() for stat in pathlib.Path("/proc").glob("[0-9]*/stat")]
    assert not any(stat[:2] == ["Z", str(os.getpid())] for stat in stats)
    with lost.explained("process"):
        lost.watch(local="RAY_ADDRESS" not in os.environ, give_up=cluster.give_up)
        worker.print_to_stdstream({{"lines": ["A worker died. Lease ID: 1"]}}, False)
        {ending}
finally:
    raylet.kill()
"""
WAIT = "threading.Event().wait(30)"


@pytest.mark.parametrize(
    ("ending", "code", "line"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("os._exit(1)", 1, "sdp: process: the driver was killed, or Ray ended it"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "sdp: process: the driver was killed"),
        (f"raylet.kill(); {WAIT}", 1, "sdp: process: Ray's raylet on this node was lost"),
        # While the lease is released, Ray's core ends the process.
        (f"lost.cleanups.insert(0, lambda: os._exit(1)); raylet.kill(); {WAIT}", 1, "sdp: process: Ray's raylet on"),
        (f"lost.cleanups.append(lambda: os._exit(1)); raylet.kill(); {WAIT}", 1, "sdp: process: Ray's raylet on"),
        (f"gcs.close(); {WAIT}", 1, "sdp: process: Ray's head (GCS) was lost"),
    ],
)
def test_a_driver_that_ends_without_an_error_says_why(ending: str, code: int, line: str, tmp_path: Path) -> None:
    program = tmp_path / "raylet" / "raylet"
    script = DRIVER.format(program=str(program), ending=ending)
    done = ended([sys.executable, "-c", script])  # reads to the end, so it waits for the small process too
    assert done.returncode == code, done.stderr
    assert done.stdout == "", "the raylets' notices"
    if not line:
        assert done.stderr == ""
    else:
        assert done.stderr.startswith(line)
        assert done.stderr.endswith("run the same command again, it continues\n")
        assert done.stderr.count("\n") == 1


def test_a_driver_whose_network_no_longer_leads_to_the_head_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    ending = f"""
        def unreachable(*args, **kwargs):
            raise OSError({errno.EHOSTUNREACH}, "unreachable")
        lost._TRIES = 3
        lost.socket.create_connection = unreachable
        {WAIT}"""
    script = DRIVER.format(program=str(tmp_path / "raylet"), ending=ending)
    done = ended([sys.executable, "-c", script])
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("sdp: process: Ray's head (GCS) was lost")
    assert done.stderr.count("\n") == 1


class _Lost(Exception):
    """An error of Ray's."""


_Lost.__module__ = "ray.exceptions"


def test_an_error_of_ray_is_one_line() -> None:
    line = r"^process: Ray failed \(the owner died\); run the same command again, it continues$"
    with pytest.raises(SdpError, match=line), explained("process"):
        raise _Lost("traceback\n  of many lines\nthe owner died\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ray::f()\n  File a\n    g()\nRuntimeError: CUDA error\nSet LAUNCH_BLOCKING=1\n\nCompile it", ""),
        ("ray::f()\n  File a\n    g()\nRuntimeError: CUDA error\n\nThe actor never ran - it was cancelled", ""),
        ("The actor died.\n\tclass_name: Hub\nThe actor is dead.", "The actor is dead."),
        ("\n", "_Lost"),
        ("  indented only", "indented only"),
    ],
)
def test_the_reason_is_what_follows_the_traceback(text: str, reason: str) -> None:
    assert reason_of(_Lost(text)).startswith(reason or "RuntimeError: CUDA error")


def test_an_error_of_sdp_inside_one_of_ray_is_raised_itself() -> None:
    with pytest.raises(SdpError, match=r"^the bucket is gone$"), explained("process"):
        raise _Lost("a task failed") from SdpError("the bucket is gone")


class _Both(_Lost, SdpError):
    """The error that Ray raises for an error of sdp in a task: its own class and sdp's at once."""


_Both.__module__ = "ray.exceptions"


def test_an_error_of_sdp_from_a_task_is_raised_without_the_task_s_traceback() -> None:
    error = _Both("traceback\n  of many lines")
    error.cause = SdpError("the bucket is gone")  # type: ignore[attr-defined]
    with pytest.raises(SdpError, match=r"^the bucket is gone$"), explained("process"):
        raise error
    with pytest.raises(SdpError, match=r"^the bucket is gone$"), explained("process"):
        raise _Lost("a later task failed") from error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), explained("process"):
        raise ZeroDivisionError
