"""Follows a job across dropped connections: its state on standard error, its log on standard output.

A thread copies the log and counts the bytes written; after a break, a new connection continues at that byte. Neither
following a job nor ending that affects the job.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from urllib3.exceptions import HTTPError, TimeoutError

from sdp.errors import SdpError
from sdp.kube import Say
from sdp.kube.api import Api, Missing, Unreachable, pause
from sdp.kube.dashboard import Dashboard
from sdp.kube.state import JobState, job_state


class ReaderGone(Exception):
    """The reader of standard output has closed it; unlike BrokenPipeError, never a network failure."""


def write_out(out: BinaryIO, data: bytes) -> None:
    """Write and flush the data."""
    try:
        out.write(data)
        out.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error


class LogPump:
    """Copies a job's log, each byte once, until it is stopped or finished."""

    def __init__(self, api: Api, state: JobState, out: BinaryIO, say: Say) -> None:
        self.submission = state.submission
        self._dashboard, self._timing = Dashboard(api, state.cluster), api.timing
        self._out, self._say = out, say
        self.reader_gone = False
        self._stopping = threading.Event()
        self._response: Any = None
        self._written = 0
        self._start_time: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"log of {self.submission}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop copying."""
        self._stopping.set()
        if response := self._response:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # already closed
                response.shutdown()

    def finish(self) -> None:
        """Copy the rest of the log of a job that has ended."""
        self.stop()
        self._thread.join(self._timing.closing_s)
        if self._thread.is_alive():
            self._say("the last lines of the log did not arrive in time; sdp logs may show them")
            return
        for attempt in range(self._timing.attempts):
            try:
                self._copy(follow=False)
                return
            except ReaderGone:
                self.reader_gone = True
                return
            except (SdpError, HTTPError, OSError) as error:
                reason = str(error)
            pause(self._timing.pause(attempt))
        self._say(f"the end of the log is missing: {reason}")

    def _run(self) -> None:
        failures, reported = 0, ""
        while not self._stopping.is_set():
            before = self._written
            try:
                self._copy(follow=True)
                failures = 0
            except ReaderGone:
                self.reader_gone = True
                return
            except (SdpError, HTTPError, OSError, ValueError) as error:  # ValueError: closed during a read
                quiet = isinstance(error, TimeoutError) or self._written > before or self._stopping.is_set()
                failures = 0 if quiet else failures + 1
                if failures > 1 and str(error) != reported:
                    reported = str(error)
                    self._say(f"the log is interrupted: {error}")
            self._stopping.wait(self._timing.pause(failures))

    def _copy(self, *, follow: bool) -> None:
        """Copy the log on one connection, from the last byte written to its end or to a break."""
        job = self._dashboard.job(self.submission) or {}
        if job.get("driver_node_id") is None:
            raise Unreachable("the head has not started the job")
        if self._start_time not in (None, job.get("start_time")):
            self._say("the job was submitted to a new head; its log starts again")
            self._written = 0
        self._start_time = job.get("start_time")
        skip = self._written
        with self._dashboard.log(self.submission, job["driver_node_id"], follow=follow) as response:
            self._response = response
            while not (follow and self._stopping.is_set()) and (chunk := response.read1(65_536)):
                new = chunk[skip:]
                skip = max(0, skip - len(chunk))
                if new:
                    write_out(self._out, new)
                    self._written += len(new)


def follow(api: Api, name: str, out: BinaryIO, say: Say) -> int:
    """Report a job's state and copy its log until it has ended; return its exit code."""
    pump: LogPump | None = None
    reported = ""
    try:
        for state in states(api, name, say):
            line = f"{name}: {state.state}{f' ({state.message})' if state.message else ''}"
            if line != reported:
                reported = line
                say(line)
            ended_before = state.finished and pump is None and state.started
            if state.submission and (state.state == "running" or ended_before):
                if pump and pump.submission != state.submission:
                    pump.finish()
                    pump = None
                pump = pump or LogPump(api, state, out, say)
            if pump and state.finished:
                pump.finish()
            if pump and pump.reader_gone:
                raise BrokenPipeError
        return state.exit_code
    except KeyboardInterrupt as error:
        error.add_note(f"the job continues; sdp logs {name} --follow follows it again, sdp stop {name} ends it")
        raise
    finally:
        if pump:
            pump.stop()


def states(api: Api, name: str, say: Say) -> Iterator[JobState]:
    """Yield a job's state repeatedly until it has ended; retry up to a deadline if the API server does not answer."""
    lost_at, attempt = 0.0, 0
    while True:
        try:
            state = job_state(api.get(api.path("rayjobs", name)))
        except Missing as error:
            raise Missing(f"{name}: this RayJob was deleted, and the job with it; sdp submit runs it again") from error
        except Unreachable as error:
            if not attempt:
                lost_at = time.monotonic()
                say(f"{error}; retrying for up to {api.timing.lost_s / 60:.3g} minutes, the job continues")
            if time.monotonic() - lost_at > api.timing.lost_s:
                raise Unreachable(f"{error}; gave up, sdp logs {name} --follow tries again") from error
            pause(api.timing.pause(attempt))
            attempt += 1
            continue
        if attempt:
            say("the API server answers again")
        attempt = 0
        yield state
        if state.finished:
            return
        pause(api.timing.poll_s)
