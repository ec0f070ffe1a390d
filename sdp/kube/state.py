"""What RayJobs and RayClusters say of themselves, in a few words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sdp.errors import one_line
from sdp.kube.rayjob import JOBS_FOLDER

Object = Mapping[str, Any]

ENDED = frozenset({"Complete", "Failed", "ValidationFailed"})
"""The states that a RayJob of ours never leaves."""

_WAITING = {
    "": "new",
    "Initializing": "waiting",
    "Waiting": "waiting",
    "Retrying": "retrying",
    "Suspending": "suspending",
    "Suspended": "suspended",
    "ValidationFailed": "refused",
}
_BY_CONFIG = re.compile(rf"sdp\.supervisor \S+ --config {JOBS_FOLDER}/(\S+)\.yaml(?= |$)")
_EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True, slots=True)
class JobState:
    """A RayJob in brief."""

    name: str
    job: str
    """download, process, train, train-online …; empty for somebody else's RayJob."""
    state: str
    """new, waiting, pending, running, succeeded, failed, stopped, refused, retrying, suspended or suspending."""
    cluster: str
    submission: str
    """The id that Ray knows it by; empty until it has one."""
    started: datetime | None
    ended: datetime | None
    attempts: int
    message: str
    """Why, in one line; empty where there is nothing to say."""
    finished: bool
    exit_code: int
    """Of what has finished: 0, 2 where a person has to mend something, else 1."""

    def took_s(self, now: datetime) -> float | None:
        if self.started is None:
            return None
        return max(0.0, ((self.ended or now) - self.started).total_seconds())

    def to_json(self) -> dict[str, Any]:
        moments = {"started": self.started, "ended": self.ended}
        texts = {name: moment and moment.isoformat() for name, moment in moments.items()}
        return {
            "name": self.name,
            "job": self.job,
            "state": self.state,
            "cluster": self.cluster,
            "submission": self.submission,
            **texts,
            "attempts": self.attempts,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A RayCluster in brief."""

    name: str
    state: str
    """ready, suspended, or what it is on the way to: starting."""
    workers: int
    wanted: int
    head: str
    """The head's pod; empty while there is none."""
    started: datetime | None
    message: str
    refused: bool
    """Kubernetes does not let its pods be made, as where a quota is used up."""

    def to_json(self) -> dict[str, Any]:
        fields = ("name", "state", "workers", "wanted", "head", "message")
        return {**{name: getattr(self, name) for name in fields}, "started": self.started and self.started.isoformat()}


def job_state(rayjob: Object) -> JobState:
    """A RayJob in brief."""
    about, spec, status = rayjob["metadata"], rayjob.get("spec") or {}, rayjob.get("status") or {}
    deployment, of_ray = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    times = status.get("rayJobInfo") or {}
    finished = deployment in ENDED
    started = moment(times.get("startTime")) or (moment(status.get("startTime")) if of_ray else None)
    attempts = int(status.get("failed") or 0) + int(status.get("succeeded") or 0)
    message = str(status.get("message") or "")
    return JobState(
        name=about["name"],
        job=_job(about, spec),
        state=_word(deployment, of_ray),
        cluster=status.get("rayClusterName") or (spec.get("clusterSelector") or {}).get("ray.io/cluster", ""),
        submission=status.get("jobId", ""),
        started=started,
        ended=moment(times.get("endTime")) or moment(status.get("endTime")) if finished else None,
        attempts=attempts if finished else attempts + (started is not None),
        message="" if of_ray in ("RUNNING", "SUCCEEDED") else _reason(status, message),
        finished=finished,
        exit_code=0 if of_ray == "SUCCEEDED" else _exit_code(message),
    )


def _job(about: Object, spec: Object) -> str:
    """The cluster's configuration that it runs by, else its kind, from our label."""
    kind = str((about.get("labels") or {}).get("sdp/job", ""))
    found = _BY_CONFIG.search(str(spec.get("entrypoint") or "")) if kind else None
    return found[1] if found else kind


def _word(deployment: str, of_ray: str) -> str:
    if deployment == "Running":
        return (of_ray or "pending").lower()
    if deployment == "Failed":
        return "failed"
    if deployment == "Complete":
        return (of_ray or "succeeded").lower()
    return _WAITING.get(deployment, deployment.lower())


def _reason(status: Object, message: str) -> str:
    """The message's first line, or the cluster's that is waited for."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = status.get("reason") or ""
    if lines:
        first = lines[0].removesuffix(", last available logs (truncated to 20,000 chars):")
        return first if not reason or reason == "AppFailed" else f"{reason}: {first}"
    if not reason and status.get("jobDeploymentStatus") == "Initializing":
        cluster = status.get("rayClusterStatus") or {}
        return trouble(cluster) or "the cluster is not ready yet"
    return str(reason)


def _exit_code(message: str) -> int:
    found = _EXIT_CODE.search(message)
    return 2 if found and found[1] == "2" else 1


def cluster_state(raycluster: Object) -> ClusterState:
    """A RayCluster in brief."""
    about, status = raycluster["metadata"], raycluster.get("status") or {}
    state = status.get("state") or ""
    return ClusterState(
        name=about["name"],
        state=state or "starting",
        workers=int(status.get("readyWorkerReplicas") or 0),
        wanted=int(status.get("desiredWorkerReplicas") or 0),
        head=(status.get("head") or {}).get("podName", ""),
        started=moment(about.get("creationTimestamp")),
        message="" if state == "ready" else trouble(status),
        refused=any(
            each.get("type") == "ReplicaFailure" and each.get("status") == "True"
            for each in status.get("conditions") or ()
        ),
    )


def trouble(status: Object) -> str:
    """What a RayCluster says is wrong with it, in a line."""
    for condition in status.get("conditions") or ():
        kind, holds = condition.get("type"), condition.get("status") == "True"
        if (kind == "HeadPodReady" and not holds) or (kind == "ReplicaFailure" and holds):
            words = one_line(condition.get("message") or "")
            return f"{condition.get('reason', kind)}: {words}" if words else str(condition.get("reason", kind))
    return one_line(status.get("reason") or "")


def moment(text: str | None) -> datetime | None:
    """A time as Kubernetes writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
