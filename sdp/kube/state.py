"""States of RayJobs and RayClusters, in a few words each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sdp.errors import one_line

ENDED = frozenset({"Complete", "Failed", "ValidationFailed"})
"""The final states of a RayJob."""

BY_LABEL = "sdp/submitted-by"
NOTICED_S = 60.0
"""Time for KubeRay's operator to notice that a job is new, has ended, or is to be deleted."""
SILENT = "KubeRay's operator does not answer; sdp doctor checks it"

_WAITING = {"": "new", "Initializing": "waiting", "ValidationFailed": "refused"}
_EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True, slots=True)
class JobState:
    """A RayJob's state."""

    name: str
    namespace: str
    job: str
    """download, process, train, train-online …; empty for a RayJob that is not of sdp."""
    state: str
    """new, waiting, pending, running, succeeded, failed, stopped, refused, retrying, suspended, suspending or
    deleting."""
    cluster: str
    submission: str
    """Ray's id of the job; empty until it has one."""
    by: str
    """The user who submitted it, if known."""
    created: datetime | None
    started: datetime | None
    ended: datetime | None
    attempt: str
    """The attempt in words, if the job's earlier clusters have failed."""
    message: str
    """The reason for the state in one line, if there is one."""
    finished: bool
    given_up: bool
    """True if KubeRay has stopped watching the job, after a deadline or a silence of the head: Ray may still run it."""
    exit_code: int
    """A finished job's exit code: 0, 2 for an error that the user can fix, else 1."""

    @property
    def has_log(self) -> bool:
        """Return whether the job's driver has begun."""
        return bool(self.submission) and self.started is not None and self.state != "pending"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A RayCluster's state."""

    name: str
    namespace: str
    state: str
    """ready, suspended or starting."""
    workers: int
    wanted: int
    head: str
    """The head's pod; empty if there is none."""
    message: str
    refused: bool
    """True if Kubernetes refuses to create its pods, for example because a quota is used up."""


def job_state(rayjob: Mapping[str, Any]) -> JobState:
    """Return the state of a RayJob."""
    metadata, spec, status = rayjob["metadata"], rayjob.get("spec") or {}, rayjob.get("status") or {}
    deployment, ray_status = status.get("jobDeploymentStatus") or "", status.get("jobStatus") or ""
    times = status.get("rayJobInfo") or {}
    finished = deployment in ENDED
    state = _WAITING.get(deployment, deployment.lower())
    if deployment in ("Running", "Complete"):
        state = (ray_status or {"Running": "pending", "Complete": "succeeded"}[deployment]).lower()
    message = str(status.get("message") or "")
    given_up = deployment == "Failed" and ray_status in ("", "PENDING", "RUNNING") and "jobId" in status
    said = "" if ray_status in ("RUNNING", "SUCCEEDED") and not given_up else _reason(status, message)
    created = _moment(metadata.get("creationTimestamp"))
    if not deployment and created and (datetime.now(UTC) - created).total_seconds() > NOTICED_S:
        said = SILENT
    failed, limit = int(status.get("failed") or 0), int(spec.get("backoffLimit") or 0)
    attempt = f"attempt {failed + 1} of {limit + 1}" if failed and limit and not finished else ""
    if deleted := _moment(metadata.get("deletionTimestamp")):
        held = ", ".join(metadata.get("finalizers") or ()) or "its dependents"
        state, said = "deleting", f"being deleted since {deleted.astimezone(UTC):%Y-%m-%d %H:%MZ}, held by {held}"
    return JobState(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        job=str((metadata.get("labels") or {}).get("sdp/job", "")),
        state=state,
        cluster=status.get("rayClusterName") or (spec.get("clusterSelector") or {}).get("ray.io/cluster", ""),
        submission=status.get("jobId", ""),
        by=str((metadata.get("labels") or {}).get(BY_LABEL, "")),
        created=created,
        started=_moment(times.get("startTime") or (status.get("startTime") if ray_status else None)),
        ended=_moment(times.get("endTime") or status.get("endTime")) if finished else None,
        attempt=attempt,
        message="; ".join(filter(None, (attempt, said))),
        finished=finished,
        given_up=given_up,
        exit_code=exit_code(ray_status, failed_for_good=_EXIT_CODE.findall(message)[:1] == ["2"]),
    )


def exit_code(ray_status: str, *, failed_for_good: bool) -> int:
    """Return the exit code of a job: 0, 1 (trying again may help) or 2 (it will not)."""
    if ray_status == "SUCCEEDED":
        return 0
    return 2 if failed_for_good else 1


def _reason(status: Mapping[str, Any], message: str) -> str:
    """Return the message's first line, or the state of a cluster that the job waits for."""
    reason = str(status.get("reason") or "")
    if message.strip():
        first, *log = message.strip().splitlines()
        if errors := [line for line in log if line.startswith("sdp: ")]:
            return errors[-1]
        if first.startswith("runtime_env setup failed"):
            lines = [line.strip() for line in (first, *log)]  # a traceback, then pip's output if it was pip
            cause = [line for line in lines if line and not line.startswith("[notice]")][-1]
            return f"its runtime environment cannot be made: {cause}"
        first = first.removesuffix(", last available logs (truncated to 20,000 chars):")
        return first if reason in ("", "AppFailed") else f"{reason}: {first}"
    if not reason and status.get("jobDeploymentStatus") == "Initializing":
        return _trouble(status.get("rayClusterStatus") or {}) or "the cluster is not ready yet"
    return reason


def cluster_state(raycluster: Mapping[str, Any]) -> ClusterState:
    """Return the state of a RayCluster."""
    status = raycluster.get("status") or {}
    state, message = status.get("state") or "starting", _trouble(status)
    if state == "ready" and _condition(status, "HeadPodReady", "False"):  # KubeRay never takes that state back
        state = "starting"
    return ClusterState(
        name=raycluster["metadata"]["name"],
        namespace=raycluster["metadata"].get("namespace", ""),
        state=state,
        workers=int(status.get("readyWorkerReplicas") or 0),
        wanted=int(status.get("desiredWorkerReplicas") or 0),
        head=(status.get("head") or {}).get("podName", ""),
        message=message,
        refused=bool(_condition(status, "ReplicaFailure", "True")),
    )


def _trouble(status: Mapping[str, Any]) -> str:
    """Return the problem that a RayCluster reports, in one line."""
    for kind, bad in (("ReplicaFailure", "True"), ("HeadPodReady", "False")):
        if condition := _condition(status, kind, bad):
            reason = str(condition.get("reason", kind))
            words = one_line(condition.get("message") or "").removeprefix(f"{reason} ")  # KubeRay repeats it
            return f"{reason}: {words}" if words else reason
    return one_line(status.get("reason") or "")


def _condition(status: Mapping[str, Any], kind: str, holds: str) -> Mapping[str, Any]:
    conditions = status.get("conditions") or ()
    return next((each for each in conditions if (each.get("type"), each.get("status")) == (kind, holds)), {})


def _moment(text: str | None) -> datetime | None:
    """Parse a time as Kubernetes writes it."""
    return datetime.fromisoformat(text) if text else None
