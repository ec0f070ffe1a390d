"""The one line that a job prints when it loses Ray.

Ray's core ends a driver that has lost its raylet at once, and one that has lost the GCS after a minute, without a word.
So a thread watches for both losses, and a small process waits for the driver's end and prints the line in its place.
"""

import atexit
import contextlib
import errno
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from sdp.console import as_json, duration, formatted, say
from sdp.errors import SdpError, one_line
from sdp.leaving import cleanups, raylet_command

LOGS = "/tmp/ray/session_latest/logs"
_LOOK_S, _PRINT_S = 2.0, 5.0
_PATIENCE_S = 45.0
"""The longest silence of a cluster's GCS, which restarts if it has a store of its own. Ray's core waits 60 s."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_REMEDY = "run the same command again, it continues"
_NOTES = ("The actor never ran", "Failed to apply UDF transform")
"""The beginnings of what Ray adds below a reason."""
_PRINT_LAST_LINE = """
line=$1
while read -r word; do
  case $word in over) exit ;; up) line=$2 ;; raylet) line=$3 ;; gcs) line=$4 ;; esac
done
printf '%s\\n' "$line" >&2
"""
"""A shell script that waits for the end of the driver, which keeps the other end of standard input open."""

log = logging.getLogger(__name__)


class _Watch:
    """The watch over one driver and job."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._pipe: int | None = None
        self.looks = False
        self._printer: subprocess.Popen[bytes]
        self._over = threading.Event()
        self._lock = threading.Lock()

    def expect(self, *, local: bool, limit_s: float) -> None:
        """Have a line printed if this process ends before `end`: Ray's core also ends a driver that is connecting."""
        if self._pipe is not None:
            return
        logs = f"see {LOGS}" if local else "see the nodes' logs"
        lines = [
            f"{self.job}: Ray did not start within {duration(limit_s)}, or ended the driver meanwhile ({logs}); "
            f"{_REMEDY}",
            f"{self.job}: the driver was killed, or Ray's core ended the driver ({logs}); {_REMEDY}",
            f"{self.job}: Ray's raylet on this node was lost ({logs}); {_REMEDY}",
            f"{self.job}: Ray's head (GCS) was lost ({logs}); {_REMEDY}",
        ]
        prefix = "" if as_json() else "sdp: "
        standard_input, self._pipe = os.pipe()
        # In a session of its own, so that Ctrl-C reaches the driver alone.
        self._printer = subprocess.Popen(
            ["/bin/sh", "-c", _PRINT_LAST_LINE, "sh", *(formatted(f"{prefix}{line}", "error") for line in lines)],
            stdin=standard_input,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(standard_input)
        cleanups.append(self.end)
        atexit.register(self.end)  # before Ray's own, which ends the raylet in order

    def begin(self, *, local: bool) -> None:
        """Watch this driver's Ray, until `end`."""
        import ray

        if self.looks:
            return
        self.looks = True
        self._tell("up")
        context = ray.get_runtime_context()
        raylet, gcs = _raylet_of(context.get_node_id()), context.gcs_address
        threading.Thread(target=self._look, args=(raylet, gcs, local), name="sdp-ray-loss", daemon=True).start()

    def end(self) -> None:
        """End the watch without a line."""
        with self._lock:
            self._over.set()
            if self._pipe is not None:
                self._tell("over")
                os.close(self._pipe)
                self._pipe = None
                self._printer.wait()
        if self.end in cleanups:
            cleanups.remove(self.end)
        atexit.unregister(self.end)

    def _look(self, raylet: int | None, gcs: str, local: bool) -> None:
        """Watch for the loss of the raylet or of the GCS until the job ends."""
        raylet_end, process = select.poll(), None
        if raylet is not None:
            with contextlib.suppress(OSError):  # ended already: the driver's next call fails
                process = os.fdopen(os.pidfd_open(raylet))
                raylet_end.register(process, select.POLLIN)
        with process or contextlib.nullcontext():
            self._poll(raylet_end, gcs, local)

    def _poll(self, raylet_end: select.poll, gcs: str, local: bool) -> None:
        host, _, port = gcs.rpartition(":")
        silent_since: float | None = None
        while not self._over.is_set():
            if raylet_end.poll(1000 * _LOOK_S):
                self._die("raylet")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
                silent_since = None
            except OSError as error:
                if not isinstance(error, ConnectionError | TimeoutError) and error.errno not in _UNREACHABLE:
                    silent_since = None  # no name resolved, or no descriptor free: this says nothing about the head
                    continue
                first, silent_since = silent_since is None, silent_since or time.monotonic()
                if time.monotonic() - silent_since > _PATIENCE_S or (
                    local and isinstance(error, ConnectionRefusedError)
                ):
                    self._die("gcs")
                if first:
                    say(f"{self.job}: Ray's head (GCS) does not answer; waiting up to {_PATIENCE_S:g} s for it")

    def _die(self, lost: str) -> None:
        """End the driver, whose Ray will not come back, unless it ends in order already."""
        with self._lock:
            if not self._over.is_set():
                self._tell(lost)
                assert self._pipe is not None
                os.close(self._pipe)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._printer.wait(_PRINT_S)  # its line comes before the supervisor's
                os._exit(1)

    def _tell(self, word: str) -> None:
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # the small process was killed
            os.write(self._pipe, f"{word}\n".encode())


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


def expect(*, local: bool, limit_s: float) -> None:
    """Have a line printed if Ray ends this driver while it connects, if it runs an `explained` job."""
    if _watch is not None:
        _watch.expect(local=local, limit_s=limit_s)


def watch(*, local: bool) -> None:
    """Watch the Ray that this driver has just connected to, its own or a cluster's, if it runs an `explained` job."""
    _hush()
    if _watch is not None:
        _watch.expect(local=local, limit_s=0.0)
        _watch.begin(local=local)


def signalled() -> None:
    """Print nothing about a driver that was asked to end while it connects: its Ray has got the signal, too."""
    if _watch is not None and not _watch.looks:
        _watch.end()


def _hush() -> None:
    """Log the raylets' notices, which Ray prints on standard output even where log_to_driver is False."""
    from ray._private import worker

    def note(data: dict[str, list[str]], ignore_prefix: bool = False) -> None:  # noqa: ARG001 (Ray's)
        log.info("%s", one_line(" ".join(data["lines"])))

    worker.print_to_stdstream = note


def _raylet_of(node: str) -> int | None:
    """Return the pid of this node's raylet."""
    import ray

    if not hasattr(os, "pidfd_open"):  # not Linux
        return None
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
    names = [info["RayletSocketName"].encode() for info in nodes if info["NodeID"] == node]
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return next((pid for pid in pids if names and names[0] in raylet_command(pid)), None)
