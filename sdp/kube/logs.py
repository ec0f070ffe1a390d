"""`sdp logs`: the log of a job's driver."""

import sys
from typing import BinaryIO

from urllib3.exceptions import HTTPError

from sdp.errors import UserError
from sdp.kube import Say
from sdp.kube.api import Api, Missing, Unreachable
from sdp.kube.dashboard import Dashboard, RayRefused
from sdp.kube.follow import ReaderGone, follow, write_out
from sdp.kube.state import JobState, job_state


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
    dashboard = Dashboard(api, state.cluster)
    try:
        node = (dashboard.job(state.submission) or {}).get("driver_node_id")
        if node is None:
            raise UserError(f"logs: the head of {state.cluster!r} has no record of {name}; it may have been replaced")
        with dashboard.log(state.submission, node, lines=lines) as response:
            while chunk := response.read1(65_536):
                write_out(target, chunk)
    except ReaderGone as error:
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
