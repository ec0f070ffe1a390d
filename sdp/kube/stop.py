"""`sdp stop`: ends a job, with time for a last checkpoint."""

import time

from sdp.errors import SdpError
from sdp.kube import Say
from sdp.kube.api import Api, Missing, Unreachable
from sdp.kube.dashboard import Dashboard, RayRefused
from sdp.kube.logs import find_job, states
from sdp.kube.rayjob import STOP_WAIT_S
from sdp.kube.state import JobState

NOTICED_S = 60.0
"""Time for the operator to notice that a job has ended."""


def stop(api: Api, name: str, say: Say, *, wait: bool = True, delete: bool = False) -> None:
    """Stop a job: its driver gets SIGTERM, writes a checkpoint and ends. The job can be submitted again.

    KubeRay cannot suspend a job on a shared cluster, so Ray stops the job, and its RayJob stays as a record; the RayJob
    of a job that has not started is deleted.
    """
    state = find_job(api, name)
    if state.finished:
        say(f"{name} has already ended: {state.state}")
    elif not state.submission or state.started is None:
        say(f"{name} had not started; deleting its RayJob")
        delete = True
    else:
        _stop(api, state, delete=delete, say=say)
        if wait:
            _wait(api, name, say)
    if delete:
        try:
            api.delete(api.path("rayjobs", name))
        except Missing:
            return
        if state.finished:
            say(f"deleted the RayJob {name}")


def _stop(api: Api, state: JobState, *, delete: bool, say: Say) -> None:
    name = state.name
    try:
        stopping = Dashboard(api, state.cluster).stop(state.submission)
    except (Missing, Unreachable, RayRefused) as error:
        if not delete:
            raise SdpError(f"{error}; sdp stop {name} --delete deletes the RayJob anyway") from error
        say(f"{error}; deleting the RayJob anyway")
        return
    message = f"{name} is stopping; it has up to {STOP_WAIT_S} s for a last checkpoint"
    say(message if stopping else f"{name} is ending")


def _wait(api: Api, name: str, say: Say) -> None:
    seconds = STOP_WAIT_S + NOTICED_S
    deadline = time.monotonic() + seconds
    try:
        for state in states(api, name, say):
            if not state.finished and time.monotonic() > deadline:
                raise SdpError(f"{name} is still {state.state} after {seconds:.0f} s; sdp stop {name} --delete ends it")
    except Missing:
        return
    except KeyboardInterrupt as error:
        error.add_note(f"{name} keeps stopping; sdp status {name} shows it")
        raise
    say(f"{name}: {state.state}; sdp submit {state.job or 'JOB'} continues from storage")
