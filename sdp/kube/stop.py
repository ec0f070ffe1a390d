"""`sdp stop`: end a job, with time for a last checkpoint."""

from collections.abc import Callable

from sdp.errors import SdpError
from sdp.kube.answers import Missing, Unreachable
from sdp.kube.api import Api
from sdp.kube.dashboard import Dashboard, RayRefused
from sdp.kube.follow import wait_until_finished
from sdp.kube.logs import find_job
from sdp.kube.rayjob import STOP_WAIT_S

Say = Callable[[str], None]

SEEN_S = 60.0
"""What the operator may take to see that a job has ended, beyond what the job takes to end."""


class CannotTell(SdpError):
    """The head that runs a job was not there to be told."""


class StillRunning(SdpError):
    """A job that was told to stop and has not, so far."""


def stop(api: Api, name: str, say: Say, *, wait: bool = True, delete: bool = False) -> None:
    """Tell a job to stop: its driver gets SIGTERM, writes a checkpoint and ends. It can be submitted again.

    KubeRay can suspend no job on a shared cluster, so the job itself is stopped, and its RayJob stays as a record; one
    that has not begun has nothing to record and is deleted.
    """
    state = find_job(api, name)
    if state.finished:
        say(f"{name} has ended before: {state.state}")
    elif not state.submission or state.started is None:
        say(f"{name} had not begun; its RayJob is deleted")
        delete = True
    else:
        _tell(api, name, state.cluster, state.submission, delete=delete, say=say)
        if wait:
            _wait(api, name, say)
    if delete:
        try:
            api.delete(api.mine("rayjobs", name))
        except Missing:
            return
        if not state.finished:
            return
        say(f"deleted the RayJob {name}")


def _tell(api: Api, name: str, cluster: str, submission: str, *, delete: bool, say: Say) -> None:
    try:
        told = Dashboard(api, cluster).stop(submission)
    except (Missing, Unreachable, RayRefused) as error:
        if not delete:
            raise CannotTell(f"{error}; sdp stop {name} --delete takes the RayJob away all the same") from error
        say(f"{error}; the RayJob is deleted all the same")
        return
    say(f"{name} is told to stop; it has up to {STOP_WAIT_S} s for a last checkpoint" if told else f"{name} is ending")


def _wait(api: Api, name: str, say: Say) -> None:
    try:
        state = wait_until_finished(api, name, STOP_WAIT_S + SEEN_S)
    except Missing:
        return
    except KeyboardInterrupt as error:
        error.add_note(f"{name} goes on stopping; sdp status {name} shows it")
        raise
    if not state.finished:
        raise StillRunning(
            f"{name} is still {state.state} after {STOP_WAIT_S + SEEN_S:.0f} s; sdp stop {name} --delete ends it"
        )
    say(f"{name}: {state.state}; sdp submit {state.job or 'JOB'} continues from storage")
