"""`sdp stop`: ends a job, with time for a last checkpoint."""

import time
from contextlib import suppress

import yaml

from sdp.console import SUBMITTED_ENV, visible
from sdp.errors import SdpError
from sdp.kube import Object, Say
from sdp.kube.api import Api, Missing
from sdp.kube.head import RayHead
from sdp.kube.logs import runs_on, seen_by_ray, states
from sdp.kube.rayjob import STOP_WAIT_S
from sdp.kube.state import NOTICED_S, JobState, job_state

_NO_FINALIZERS = '{"metadata":{"finalizers":null}}'


def stop(api: Api, name: str, say: Say, *, delete: bool = False) -> None:
    """Stop a job: its driver gets SIGTERM, writes a checkpoint and ends. The job can be submitted again.

    KubeRay cannot suspend a job on a shared cluster, so Ray stops the job, and its RayJob stays as a record; the RayJob
    of a job that has not started is deleted.
    """
    rayjob = api.get(api.path("rayjobs", name))
    state = job_state(rayjob)
    if state.finished and not runs_on(api, state):
        say(f"{name} has already ended: {state.state}")
    elif not state.has_log:
        say(f"{name} had not started")
        delete = True
    else:
        try:
            RayHead(api, state.cluster).stop(state.submission)
        except SdpError as error:
            if not delete:
                raise type(error)(f"{error}; sdp stop {name} --delete deletes the RayJob anyway") from error
            say(str(error))
        else:
            say(f"{name} is stopping; it has up to {STOP_WAIT_S} s for a last checkpoint")
            _wait(api, state, say, _command(rayjob, state.job))
    if delete:
        _delete(api, name, say)
        say(f"deleted the RayJob {name}")


def _delete(api: Api, name: str, say: Say) -> None:
    """Delete a RayJob, and wait until it is gone: the operator first stops its job."""
    deadline = time.monotonic() + NOTICED_S
    with suppress(Missing):
        api.delete(api.path("rayjobs", name))
        for state in states(api, name, say, until_gone=True):
            if time.monotonic() > deadline:
                force = f"kubectl -n {api.namespace} patch rayjob {name} --type merge -p '{_NO_FINALIZERS}'"
                raise SdpError(
                    f"{name} is {state.message}; KubeRay's operator releases it (sdp doctor), or, by force, {force}"
                )


def _command(rayjob: Object, job: str) -> str:
    """Return the command that submits a job again: that of its RayJob, if this has one."""
    with suppress(yaml.YAMLError, LookupError, TypeError, AttributeError, RecursionError):
        return visible(str(yaml.safe_load(rayjob["spec"]["runtimeEnvYAML"])["env_vars"][SUBMITTED_ENV]))
    return f"sdp submit {job or 'JOB'}"


def _wait(api: Api, job: JobState, say: Say, command: str) -> None:
    deadline = time.monotonic() + STOP_WAIT_S + NOTICED_S
    try:
        seen = seen_by_ray(api, job) if job.given_up else states(api, job.name, say)
        for state in seen:
            if not state.finished and time.monotonic() > deadline:
                raise SdpError(f"{job.name} is still {state.state}; sdp stop {job.name} --delete ends it")
    except Missing:
        return
    except KeyboardInterrupt as error:
        error.add_note(f"{job.name} keeps stopping; sdp status {job.name} shows it")
        raise
    say(f"{job.name}: {state.state}; {command} continues from storage")
