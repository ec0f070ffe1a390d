"""The one line that a job prints when it loses Ray.

Ray's core ends a driver that has lost the GCS after a minute and without a word, and leaves one that has lost its
raylet waiting. So a thread watches both, and a small process says so if the driver ends in another way.
"""

import atexit
import contextlib
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from sdp.console import duration
from sdp.errors import SdpError, one_line
from sdp.leaving import cleanups, raylet_command
from sdp.ray import internals

LOGS = "/tmp/ray/session_latest/logs"
START_S = 180.0
"""The longest start of a Ray, which takes seconds, and a minute on a busy machine."""
_LOOK_S = 2.0
_LOCAL_TRIES, _TRIES = 2, 22
"""Connections in a row that a local GCS may refuse, and a cluster's, which may restart. Ray's core waits 60 s."""
_REMEDY = "run the same command again, it continues"
_NOTES = ("The actor never ran", "Failed to apply UDF transform")
"""The beginnings of what Ray adds below a reason."""
_PRINT_UNLESS_OVER = "read -r _ || printf '%s\\n' \"$1\" >&2"
"""A shell script that prints a line if the driver, which holds the other end of standard input, ends without a word."""


class _Watch:
    """The watch over one driver and job."""

    def __init__(self, job: str) -> None:
        self.job, self.looks, self._logs = job, False, LOGS
        self._end_driver: Callable[[str], NoReturn]
        self._pipe: int | None = None
        self._printer: subprocess.Popen[bytes]
        self._over = threading.Event()
        self._lock = threading.RLock()

    def expect(self, *, local: bool) -> None:
        """Have a line printed if this process ends before `end`: Ray's core also ends a driver that is connecting."""
        if self._pipe is not None:
            return
        self._logs = LOGS if local else "the nodes' logs"
        line = (
            f"sdp: {self.job}: the driver was killed, or Ray ended it or did not start within "
            f"{duration(START_S)} (see {self._logs}); {_REMEDY}"
        )
        standard_input, self._pipe = os.pipe()
        command = ["/bin/sh", "-c", _PRINT_UNLESS_OVER, "sh", line]
        # Its own session, since Ctrl-C must reach only the driver.
        self._printer = subprocess.Popen(
            command, stdin=standard_input, stdout=subprocess.DEVNULL, start_new_session=True
        )
        os.close(standard_input)
        cleanups.append(self.end)
        atexit.register(self.end)  # before Ray's own, which ends the raylet in order

    def begin(self, *, local: bool, give_up: Callable[[str], NoReturn]) -> None:
        """Watch this driver's Ray until `end`, and end the driver by `give_up` if Ray is lost."""
        import ray

        if not self.looks:
            self.looks, self._end_driver = True, give_up
            context = ray.get_runtime_context()
            work = (_raylet_of(context.get_node_id()), context.gcs_address, _LOCAL_TRIES if local else _TRIES)
            threading.Thread(target=self._look, args=work, name="sdp-ray-loss", daemon=True).start()

    def end(self) -> None:
        """End the watch without a line."""
        with self._lock:
            self._over.set()
            if self._pipe is not None:
                with contextlib.suppress(OSError):  # the small process was killed
                    os.write(self._pipe, b"over\n")
                os.close(self._pipe)
                self._pipe = None
                self._printer.wait()
        if self.end in cleanups:
            cleanups.remove(self.end)
        atexit.unregister(self.end)

    def _look(self, raylet: int | None, gcs: str, tries: int) -> None:
        """End the driver when its raylet ends or the GCS no longer answers, unless the job is over."""
        host, _, port = gcs.rpartition(":")
        raylet_end, refused = select.poll(), 0
        with contextlib.ExitStack() as stack:
            if raylet is not None:
                with contextlib.suppress(OSError):  # it has ended already, so the driver's next call fails
                    process = stack.enter_context(os.fdopen(os.pidfd_open(raylet)))
                    raylet_end.register(process, select.POLLIN)
            while not self._over.is_set():
                if raylet_end.poll(1000 * _LOOK_S):  # waits that long even if no raylet is registered
                    self._give_up("Ray's raylet on this node was lost")
                try:
                    socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
                    refused = 0
                except OSError:
                    refused += 1
                if refused > tries:
                    self._give_up("Ray's head (GCS) was lost")

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if not self._over.is_set():
                self._end_driver(f"{self.job}: {reason} (see {self._logs}); {_REMEDY}")


_watch: _Watch | None = None


@contextlib.contextmanager
def explained(job: str) -> Iterator[None]:
    """Turn Ray's errors inside the block into one line, and have a line printed if Ray ends this process."""
    global _watch
    watch = _watch = _Watch(job)
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("ray."):
            raise
        if (own := unwrapped(error)) is not None:
            raise own from error
        raise SdpError(f"{job}: Ray failed ({reason_of(error)}); {_REMEDY}") from error
    finally:
        watch.end()
        _watch = None


def reason_of(error: BaseException) -> str:
    """Return the reason in one of Ray's errors: what follows the last line of a traceback."""
    before_notes = takewhile(lambda line: not line.startswith(_NOTES), str(error).splitlines())
    lines = [line for line in before_notes if line.strip()]
    frames = [number for number, line in enumerate(lines) if line[0].isspace()]
    reason = lines[frames[-1] + 1 :] if frames else lines
    return one_line(" ".join(reason or lines[-1:]) or type(error).__name__, 300)


def unwrapped(error: BaseException) -> SdpError | None:
    """Return the error of sdp that caused one of Ray's, if one did."""
    while (cause := getattr(error, "cause", None) or error.__cause__) is not None:
        # Ray raises a class that is both, whose text is the worker's whole traceback.
        if isinstance(cause, SdpError) and not type(cause).__module__.startswith("ray."):
            return cause
        error = cause
    return None


def expect(*, local: bool) -> None:
    """Have a line printed if Ray ends this driver while it connects, if it runs an `explained` job."""
    if _watch is not None:
        _watch.expect(local=local)


def watch(*, local: bool, give_up: Callable[[str], NoReturn]) -> None:
    """Watch the Ray that this driver has just connected to, its own or a cluster's, if it runs an `explained` job."""
    internals.hush()
    if _watch is not None:
        _watch.expect(local=local)
        _watch.begin(local=local, give_up=give_up)


def end() -> None:
    """Print nothing more about this driver, which has said why it ends."""
    if _watch is not None:
        _watch.end()


def signalled() -> None:
    """Print nothing about a driver that was asked to end while it connects: its Ray has got the signal, too."""
    if _watch is not None and not _watch.looks:
        _watch.end()


def _raylet_of(node: str) -> int | None:
    """Return the pid of this node's raylet; None where processes cannot be watched."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return None
    names = [one["RayletSocketName"].encode() for one in internals.nodes() if one["NodeID"] == node]
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return next((pid for pid in pids if names and names[0] in raylet_command(pid)), None)
