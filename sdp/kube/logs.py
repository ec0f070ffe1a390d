"""`sdp logs`, and following a job: its state on standard error, its log on standard output.

Neither following a job nor ending that affects the job.
"""

import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

from urllib3.exceptions import HTTPError
from websocket import WebSocketException, WebSocketTimeoutException

from sdp.errors import SdpError, UserError
from sdp.kube import Say
from sdp.kube.api import Api, Missing, Unreachable, pause
from sdp.kube.dashboard import Dashboard, RayRefused
from sdp.kube.state import JobState, job_state


class _ReaderGone(Exception):
    """The reader of standard output has closed it; unlike BrokenPipeError, never a network failure."""


def _write_out(out: BinaryIO, data: bytes) -> None:
    try:
        out.write(data)
        out.flush()
    except BrokenPipeError as error:
        raise _ReaderGone from error


def logs(
    api: Api, name: str, say: Say, *, following: bool = False, lines: int = -1, out: BinaryIO | None = None
) -> int:
    """Write a job's log to standard output; if following, until the job has ended, and return its exit code."""
    target = out or sys.stdout.buffer
    state = find_job(api, name)
    if following:
        return follow(api, name, target, say)
    if not state.submission or state.started is None:
        cause = f" ({state.message})" if state.message else ""
        raise UserError(f"logs: {name} has not started: it is {state.state}{cause}; --follow waits for it")
    try:
        with Dashboard(api, state.cluster).log(state.submission, lines=lines) as response:
            while chunk := response.read1(65_536):
                _write_out(target, chunk)
    except _ReaderGone as error:
        raise BrokenPipeError from error
    except Missing as error:
        raise UserError(f"logs: cluster {state.cluster!r} is gone, and the log of {name} with it") from error
    except RayRefused as error:
        raise UserError(f"logs: the head of {state.cluster!r} has no log of {name}: {error}") from error
    except (HTTPError, OSError) as error:
        raise Unreachable(f"logs: the head of {state.cluster!r} closed the log ({error}); try again") from error
    return 0


def find_job(api: Api, name: str) -> JobState:
    """Return a RayJob's state; if it does not exist, raise an error that lists the others."""
    try:
        return job_state(api.get(api.path("rayjobs", name)))
    except Missing as error:
        have = ", ".join(rayjob["metadata"]["name"] for rayjob in api.list(api.path("rayjobs"))[:10]) or "none"
        raise UserError(f"no RayJob {name!r} in namespace {api.namespace!r}; it has {have}") from error


def follow(api: Api, name: str, out: BinaryIO, say: Say) -> int:
    """Report a job's state and copy its log until it has ended; return its exit code.

    A log whose connection breaks is continued where it broke, or begun again if the head was replaced.
    """
    copied: dict[tuple[str, str], int] = {}  # bytes of the log, by submission and head
    whole, reported, failure = "", "", ""
    try:
        for state in states(api, name, say):
            line = f"{name}: {state.state}{f' ({state.message})' if state.message else ''}"
            if line != reported:
                reported = line
                say(line)
            has_log = state.submission and (state.state == "running" or (state.finished and state.started))
            if not has_log or whole == state.submission:
                continue
            try:
                dashboard = Dashboard(api, state.cluster)
                log = state.submission, dashboard.head_pod()
                skip = copied.setdefault(log, 0)
                for chunk in dashboard.tail(state.submission):
                    if new := chunk[skip:]:
                        _write_out(out, new)
                        copied[log] += len(new)
                    skip = max(0, skip - len(chunk))
                whole = state.submission
            except WebSocketTimeoutException:
                continue  # a job that is silent
            except (SdpError, WebSocketException, HTTPError, OSError) as error:
                if str(error) != failure:
                    failure = str(error)
                    say(f"the log is interrupted: {error}")
        return state.exit_code
    except _ReaderGone as error:
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
