"""Follows a job: its state on standard error, its log on standard output.

Neither following a job nor ending that affects the job.
"""

import time
from collections.abc import Iterator
from typing import BinaryIO

from urllib3.exceptions import HTTPError
from websocket import WebSocketException, WebSocketTimeoutException

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


class _Copy:
    """A job's log as far as it has been written out; a new connection continues there."""

    def __init__(self, api: Api, state: JobState, out: BinaryIO, say: Say) -> None:
        self.submission, self._dashboard = state.submission, Dashboard(api, state.cluster)
        self._out, self._say, self._written, self.whole = out, say, 0, False

    def run(self) -> None:
        """Write out what comes until the job ends, or until the connection breaks."""
        pod, skip = self._dashboard.pod, self._written
        for chunk in self._dashboard.tail(self.submission):
            if pod and pod != self._dashboard.pod:
                self._say("the job was submitted to a new head; its log starts again")
                pod, skip, self._written = "", 0, 0
            new = chunk[skip:]
            skip = max(0, skip - len(chunk))
            if new:
                write_out(self._out, new)
                self._written += len(new)
        self.whole = True


def follow(api: Api, name: str, out: BinaryIO, say: Say) -> int:
    """Report a job's state and copy its log until it has ended; return its exit code."""
    copy: _Copy | None = None
    reported, failure = "", ""
    try:
        for state in states(api, name, say):
            line = f"{name}: {state.state}{f' ({state.message})' if state.message else ''}"
            if line != reported:
                reported = line
                say(line)
            if not state.submission or not (state.state == "running" or (state.finished and state.started)):
                continue
            if copy is None or copy.submission != state.submission:
                copy = _Copy(api, state, out, say)
            try:
                if not copy.whole:
                    copy.run()
            except WebSocketTimeoutException:
                continue  # a job that is silent
            except (SdpError, WebSocketException, HTTPError, OSError) as error:
                if str(error) != failure:
                    failure = str(error)
                    say(f"the log is interrupted: {error}")
        return state.exit_code
    except ReaderGone as error:
        raise BrokenPipeError from error
    except KeyboardInterrupt as error:
        error.add_note(f"the job continues; sdp logs {name} --follow follows it again, sdp stop {name} ends it")
        raise


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
