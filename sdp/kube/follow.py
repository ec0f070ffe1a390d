"""Following a job: its state on standard error, its log on standard output, across dropped connections.

The log is read by a thread of its own, which counts the bytes it has handed on: a connection that breaks is made anew
and continues there. The job does not notice any of it, nor that we stop looking.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import BinaryIO

from sdp.errors import SdpError
from sdp.kube import wire
from sdp.kube.answers import Missing, Unreachable
from sdp.kube.api import Api, Stream
from sdp.kube.dashboard import Dashboard
from sdp.kube.state import JobState, job_state
from sdp.kube.wire import Failures, Timing

Say = Callable[[str], None]


class ReaderGone(Exception):
    """Whoever read our output has seen enough; no failure of the network's, though it has the same type."""


def hand_on(out: BinaryIO, data: bytes) -> None:
    """Write it, at once."""
    try:
        out.write(data)
        out.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error


class LogPump(AbstractContextManager["LogPump"]):
    """Hands on a job's log, each byte once, until it is told that the job has ended."""

    def __init__(self, dashboard: Dashboard, submission: str, out: BinaryIO, say: Say, timing: Timing) -> None:
        self.submission = submission
        self._dashboard, self._out, self._say, self._timing = dashboard, out, say, timing
        self.reader_gone = False
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._seen = 0
        self._begun: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"log of {submission}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The job has ended: hand on what is left of its log, for as long as that may take."""
        self._ending.set()
        with self._lock:
            if self._stream:
                self._stream.hang_up()
        self._thread.join(self._timing.closing_s)
        if self._thread.is_alive():
            self._say("the last lines of the log did not come in time; sdp logs may show them")

    def __exit__(self, *_: object) -> None:
        """Stop at once, wherever it is."""
        self._given_up.set()
        self._ending.set()
        with self._lock:
            if self._stream:
                self._stream.hang_up()

    def _run(self) -> None:
        failures, told = 0, ""
        while not self._given_up.is_set():
            last = self._ending.is_set()
            before = self._seen
            try:
                self._once(follow=not last)
                if last:
                    return
                failures = 0
            except ReaderGone:
                self.reader_gone = True
                return
            except (SdpError, *Failures, ValueError) as error:
                # ValueError: a stream that was closed while we were reading from it
                quiet = isinstance(error, TimeoutError) or self._seen > before
                failures = 0 if quiet else failures + 1
                if last and failures >= self._timing.attempts:
                    self._say(f"the end of the log is missing: {error}")
                    return
                if failures > 1 and str(error) != told:
                    told = str(error)
                    self._say(f"no log just now: {error}")
            if not last:
                self._ending.wait(self._timing.pause(failures))
            elif failures:
                self._given_up.wait(self._timing.pause(failures))

    def _once(self, *, follow: bool) -> None:
        """Read the log on one connection, from where we are to its end or to a break."""
        known = self._dashboard.job(self.submission) or {}
        node, begun = known.get("driver_node_id"), known.get("start_time")
        if node is None:
            raise Unreachable("the head has not begun the job (again)")
        if self._begun is not None and begun != self._begun:
            self._say("the job was submitted to a new head; its log begins again")
            self._seen = 0
        self._begun = begun
        skip = self._seen
        with self._dashboard.log(self.submission, node, follow=follow) as stream:
            with self._lock:
                self._stream = stream
                if follow and self._ending.is_set():
                    return
            try:
                while chunk := stream.read():
                    new = chunk[skip:]
                    skip = max(0, skip - len(chunk))
                    if new:
                        hand_on(self._out, new)
                        self._seen += len(new)
            finally:
                with self._lock:
                    self._stream = None


def follow(api: Api, name: str, out: BinaryIO, say: Say) -> int:
    """Tell what becomes of a job until it has ended; returns its exit code."""
    pump: LogPump | None = None
    told = ""
    try:
        while True:
            state, rayjob = _look(api, name, say)
            line = f"{name}: {state.state}{f' ({state.message})' if state.message else ''}"
            if line != told:
                told = line
                say(line)
            if state.submission and state.state == "running" and (pump is None or pump.submission != state.submission):
                if pump:
                    pump.finish()
                pump = LogPump(Dashboard(api, state.cluster), state.submission, out, say, api.timing)
            if pump and pump.reader_gone:
                raise BrokenPipeError
            if state.finished:
                break
            api.changed(api.mine("rayjobs"), rayjob, api.timing.watch_s)
        if pump is None and state.submission and state.started:  # it was over before we looked
            pump = LogPump(Dashboard(api, state.cluster), state.submission, out, say, api.timing)
        if pump:
            pump.finish()
        return state.exit_code
    except KeyboardInterrupt as error:
        error.add_note(f"the job goes on without us; sdp logs {name} --follow looks again, sdp stop {name} ends it")
        raise
    finally:
        if pump:
            pump.__exit__()


def wait_until_finished(api: Api, name: str, seconds: float) -> JobState:
    """The state of a job when it has ended, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        rayjob = api.get(api.mine("rayjobs", name))
        state = job_state(rayjob)
        left = deadline - time.monotonic()
        if state.finished or left <= 0:
            return state
        api.changed(api.mine("rayjobs"), rayjob, min(left, api.timing.watch_s))


def _look(api: Api, name: str, say: Say) -> tuple[JobState, dict[str, object]]:
    """The job as it is now; a server that does not answer is asked again, up to a deadline."""
    lost_at: float | None = None
    attempt = 0
    while True:
        try:
            rayjob = api.get(api.mine("rayjobs", name))
            if lost_at is not None:
                say("the API server answers again")
            return job_state(rayjob), rayjob
        except Missing as error:
            raise Missing(
                f"{name}: somebody has deleted this RayJob, and with it the job; sdp submit runs it again"
            ) from error
        except Unreachable as error:
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
                say(f"{error}; asking again for up to {api.timing.lost_s / 60:.3g} minutes, the job goes on")
            if now - lost_at > api.timing.lost_s:
                raise Unreachable(f"{error}; given up, sdp logs {name} --follow looks again") from error
        wire.pause(api.timing.pause(attempt))
        attempt += 1
