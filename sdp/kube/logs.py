"""`sdp logs`: what a job's driver has written."""

import sys
from typing import BinaryIO

from sdp.errors import UserError
from sdp.kube import Say
from sdp.kube.api import Api, Missing, Unreachable
from sdp.kube.dashboard import Dashboard, RayRefused
from sdp.kube.follow import ReaderGone, follow, write_out
from sdp.kube.state import JobState, job_state


def logs(
    api: Api, name: str, say: Say, *, following: bool = False, lines: int = -1, out: BinaryIO | None = None
) -> int:
    """Write a job's log to standard output; following it, until the job has ended, whose exit code is returned."""
    from urllib3.exceptions import HTTPError

    target = out or sys.stdout.buffer
    state = find_job(api, name)
    if following:
        return follow(api, name, target, say)
    if not state.submission or state.started is None:
        why = f" ({state.message})" if state.message else ""
        raise UserError(f"logs: {name} has not begun: it is {state.state}{why}; --follow waits for it")
    dashboard = Dashboard(api, state.cluster)
    try:
        node = (dashboard.job(state.submission) or {}).get("driver_node_id")
        if node is None:
            raise UserError(f"logs: the head of {state.cluster!r} knows nothing of {name} (any more)")
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
        raise Unreachable(f"logs: the head of {state.cluster!r} stopped in the middle ({error}); try again") from error
    return 0


def find_job(api: Api, name: str) -> JobState:
    """Return a RayJob's state; an error that names the others where there is none."""
    try:
        return job_state(api.get(api.mine("rayjobs", name)))
    except Missing as error:
        have = ", ".join(each["metadata"]["name"] for each in api.list(api.mine("rayjobs"))[:10]) or "none"
        raise UserError(f"there is no RayJob {name!r} in namespace {api.namespace!r}; there are {have}") from error
