"""`sdp logs`, and following a job: its state on standard error, its log on standard output.

Neither following a job nor ending that affects the job.
"""

import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from sdp.console import visible
from sdp.errors import NotFound, SdpError, UserError
from sdp.kube import Object, Say
from sdp.kube.api import Api, Missing, Unreachable
from sdp.kube.clusters import config_of
from sdp.kube.head import RayHead, head_pod
from sdp.kube.rayjob import LOGS_FOLDER
from sdp.kube.state import NOTICED_S, SILENT, JobState, exit_code, job_state
from sdp.storage import open_storage

POLL_S = 2.0
"""Pause before a job's state is read again."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_LINE = 1 << 16
"""Bytes after which a line is shown although its end is missing."""
LOST_S = 900.0
"""Time without a response from the API server after which following a job ends."""


def log_text(api: Api, name: str) -> str:
    """Return a job's log so far; if it has ended and the head is gone, what it saved to its output."""
    rayjob = api.get(api.path("rayjobs", name))
    state = job_state(rayjob)
    if not state.has_log:
        cause = f" ({state.message})" if state.message else ""
        raise UserError(f"logs: {name} has not started: it is {state.state}{cause}; --follow waits for it")
    try:
        return _plain(RayHead(api, state.cluster).log(state.submission))
    except (Missing, Unreachable):
        if not state.finished or not state.job:
            raise
        return _plain(saved_logs(api, rayjob, state.submission))


def _plain(log: str) -> str:
    """Return a log without colours, which Ray adds, and with all else that controls a terminal made visible."""
    return visible(_COLOUR.sub("", log.replace("\r\n", "\n").replace("\r", "\n")))


def saved_logs(api: Api, rayjob: Object, submission: str) -> str:
    """Return the logs that a job has saved, read with the credentials of this machine."""
    settings = config_of(api, rayjob)
    # Outside of the cluster its storage may have another address.
    address = os.environ.get("AWS_ENDPOINT_URL", settings.storage.endpoint)
    output = open_storage(settings.output.uri, settings.storage.options()).with_options(endpoint=address)
    saved = output.child(f"{LOGS_FOLDER}/{submission}")
    try:
        names = saved.names()
    except SdpError as error:
        gone = f"logs: the cluster's head is gone; its log in {saved.uri} cannot be read"
        raise type(error)(f"{gone}: {error}") from error
    if not names:
        raise NotFound(f"logs: the cluster's head is gone, and {saved.uri} is empty: it took the log along")
    return "\n".join(f"--- {saved.uri_of(name)}\n{saved.read(name).decode(errors='replace')}" for name in names)


def read_job(api: Api, name: str) -> JobState:
    """Return a RayJob's state."""
    return job_state(api.get(api.path("rayjobs", name)))


def unnoticed_end(api: Api, state: JobState) -> tuple[str, int] | None:
    """Return how a job has ended, and its exit code, if Ray has known it for long and KubeRay does not."""
    if not state.has_log:
        return None
    with suppress(SdpError):
        record = RayHead(api, state.cluster).record(state.submission)
        if time.time() - (record.get("end_time") or math.inf) / 1000 > NOTICED_S:
            code = exit_code(record["status"], failed_for_good=record.get("driver_exit_code") == 2)
            return f"{record['status'].lower()}, which KubeRay does not report: {SILENT}", code
    return None


def runs_on(api: Api, state: JobState) -> str:
    """Return what to do about a job that KubeRay has given up and Ray still runs; empty for any other."""
    with suppress(SdpError):
        if state.given_up and not RayHead(api, state.cluster).record(state.submission).get("end_time"):
            return f"Ray still runs it: sdp stop {state.name} ends it"
    return ""


def follow(api: Api, name: str, say: Say) -> int:
    """Report a job's state and copy its log until it has ended; return its exit code.

    A log whose connection breaks is continued where it broke, or begun again if the head was replaced.
    """
    copied: dict[tuple[str, str], int] = {}  # bytes of the log, by submission and head
    whole, whole_at, reported, failure = ("", ""), 0.0, "", ""
    out = sys.stdout.buffer
    try:
        for state in states(api, name, say):
            reason = "; ".join(filter(None, (state.message, runs_on(api, state))))
            line = f"{name}: {state.state}{f' ({reason})' if reason else ''}"
            if line != reported:
                reported = line
                say(line)
            if not state.has_log:
                continue
            if whole[0] == state.submission and not _has_another_head(api, state.cluster, whole[1]):
                if time.monotonic() - whole_at > NOTICED_S and (end := unnoticed_end(api, state)):
                    say(f"{name}: {end[0]}")
                    return end[1]
                continue
            try:
                head = RayHead(api, state.cluster)
                log = state.submission, head.pod
                skip = copied.setdefault(log, 0)
                rest = b""
                for chunk in chain(head.tail(state.submission), [b""]):  # the last one ends the last line
                    new, skip = rest + chunk[skip:], max(0, skip - len(chunk))
                    is_cut = chunk and len(new) < _LONGEST_LINE  # in a character or an escape
                    length = new.rfind(b"\n") + 1 if is_cut else len(new)
                    out.write(_plain(new[:length].decode(errors="replace")).encode())
                    out.flush()
                    copied[log] += length
                    rest = new[length:]
                whole, whole_at = log, time.monotonic()
            except TimeoutError:
                continue  # a job that is silent
            except SdpError as error:
                if str(error) != failure:
                    failure = str(error)
                    saved = f"; sdp logs {name} reads what the job saved" if state.finished else ""
                    say(f"the log is interrupted: {error}{saved}")
        return state.exit_code
    except KeyboardInterrupt as error:
        error.add_note(f"the job continues; sdp logs {name} --follow follows it again, sdp stop {name} ends it")
        raise


def _has_another_head(api: Api, cluster: str, pod: str) -> bool:
    """Return whether a cluster's head is another pod, on which KubeRay runs a job again by the same submission."""
    with suppress(SdpError):
        return head_pod(api, cluster)[0] != pod
    return False  # none runs, or it cannot be known now


def states(api: Api, name: str, say: Say, *, until_gone: bool = False) -> Iterator[JobState]:
    """Yield a job's state repeatedly until it has ended, or is gone; wait a while for the API server."""
    lost_at: float | None = None
    while True:
        try:
            state = read_job(api, name)
        except Missing as error:
            raise Missing(f"{name}: this RayJob was deleted, and the job with it; sdp submit runs it again") from error
        except Unreachable as error:
            if lost_at is None:
                lost_at = time.monotonic()
                say(f"{error}; retrying for up to {LOST_S / 60:.3g} minutes, the job continues")
            if time.monotonic() - lost_at > LOST_S:
                raise Unreachable(f"{error}; gave up, sdp logs {name} --follow tries again") from error
        else:
            if lost_at is not None:
                lost_at = None
                say("the API server answers again")
            yield state
            if state.finished and not until_gone:
                return
        time.sleep(POLL_S)


def seen_by_ray(api: Api, job: JobState) -> Iterator[JobState]:
    """Yield the state of a job that KubeRay no longer watches, until it has ended."""
    state = replace(job, finished=False)
    while True:
        try:
            record = RayHead(api, job.cluster).record(job.submission)
            state = replace(job, state=record["status"].lower(), finished=bool(record.get("end_time")))
        except Missing:  # its head is gone, and the job with it
            state = job
        except Unreachable:
            pass
        yield state
        if state.finished:
            return
        time.sleep(POLL_S)
