"""`sdp status`: the RayClusters and RayJobs of a namespace, or one of them with what Kubernetes says about it."""

import json
from datetime import UTC, datetime
from typing import Any

from sdp.console import duration, table
from sdp.errors import UserError, one_line
from sdp.kube.answers import Forbidden, Missing
from sdp.kube.api import Api, Object
from sdp.kube.state import ClusterState, JobState, cluster_state, job_state

_LONGEST_MESSAGE = 60
_EVENTS = 8


def status(api: Api, name: str | None = None, *, as_json: bool = False) -> str:
    """What to print."""
    if name is not None:
        return _one(api, name, as_json=as_json)
    clusters = [cluster_state(each) for each in api.list(api.mine("rayclusters"))]
    jobs = sorted(map(job_state, api.list(api.mine("rayjobs"))), key=_newest_last)
    if as_json:
        data = {"clusters": [each.to_json() for each in clusters], "jobs": [each.to_json() for each in jobs]}
        return json.dumps(data, indent=2)
    parts = [clusters_table(clusters), jobs_table(jobs, datetime.now(UTC))]
    return "\n\n".join(part for part in parts if part) or (
        f"nothing in namespace {api.namespace!r}; helm install sdp charts/sdp-cluster, or take another --namespace"
    )


def clusters_table(clusters: list[ClusterState]) -> str:
    """A line for each cluster."""
    rows = [
        (each.name, each.state, f"{each.workers} of {each.wanted}", each.head, _short(each.message))
        for each in clusters
    ]
    return table(rows, ("CLUSTER", "STATE", "WORKERS", "HEAD", "MESSAGE")) if rows else ""


def jobs_table(jobs: list[JobState], now: datetime) -> str:
    """A line for each job."""
    rows = [
        (each.name, each.state, _started(each), _took(each, now), each.attempts, each.cluster, _short(each.message))
        for each in jobs
    ]
    return table(rows, ("JOB", "STATE", "STARTED", "TOOK", "ATTEMPTS", "CLUSTER", "MESSAGE")) if rows else ""


def _one(api: Api, name: str, *, as_json: bool) -> str:
    found: list[tuple[str, Object]] = []
    for kind in ("rayjobs", "rayclusters"):
        try:
            found.append((kind, api.get(api.mine(kind, name))))
        except Missing:
            continue
    if not found:
        raise UserError(
            f"status: there is no RayJob or RayCluster {name!r} in namespace {api.namespace!r}; see sdp status"
        )
    jobs = [job_state(each) for kind, each in found if kind == "rayjobs"]
    clusters = [cluster_state(each) for kind, each in found if kind == "rayclusters"]
    events = [event for _, each in found for event in _events(api, each)]
    if as_json:
        data: dict[str, Any] = {
            "clusters": [each.to_json() for each in clusters],
            "jobs": [each.to_json() for each in jobs],
        }
        return json.dumps({**data, "events": events}, indent=2)
    parts = [clusters_table(clusters), jobs_table(jobs, datetime.now(UTC))]
    told = [(each.name, each.message) for each in clusters] + [(each.name, each.message) for each in jobs]
    parts += [f"{name}: {message}" for name, message in told if len(message) > _LONGEST_MESSAGE]
    if events:
        parts.append(
            "what Kubernetes says:\n" + "\n".join(f"  {e['at']}  {e['reason']}: {e['message']}" for e in events)
        )
    for job in jobs:
        follow = "" if job.finished else " --follow"
        parts.append(f"sdp logs {job.name}{follow} shows its log" if job.submission else "")
    return "\n\n".join(part for part in parts if part)


def _events(api: Api, item: Object) -> list[dict[str, str]]:
    """The latest events about an object, oldest first."""
    try:
        found = api.list(
            api.mine("events", group="/api/v1"), fieldSelector=f"involvedObject.uid={item['metadata']['uid']}"
        )
    except Forbidden:
        return []
    events = [
        {
            "at": str(
                each.get("lastTimestamp") or each.get("eventTime") or each["metadata"].get("creationTimestamp") or ""
            ),
            "reason": str(each.get("reason") or ""),
            "message": one_line(each.get("message") or ""),
        }
        for each in found
    ]
    return sorted(events, key=lambda event: event["at"])[-_EVENTS:]


def _newest_last(job: JobState) -> tuple[bool, str, str]:
    return job.started is None, job.started.isoformat() if job.started else "", job.name


def _started(job: JobState) -> str:
    return job.started.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ") if job.started else "-"


def _took(job: JobState, now: datetime) -> str:
    seconds = job.took_s(now)
    return "-" if seconds is None else duration(seconds)


def _short(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…"
