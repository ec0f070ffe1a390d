"""`sdp status`: the RayClusters and RayJobs of a namespace, or one of them with its latest events."""

import io
import json
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sdp.console import duration, table
from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Object
from sdp.kube.api import Api, Forbidden, Missing
from sdp.kube.logs import logs
from sdp.kube.rayjob import kind_of
from sdp.kube.state import ClusterState, JobState, cluster_state, job_state

_LONGEST_MESSAGE = 60
_EVENTS = 8
_LAST_LINES = 200
"""Last lines of a log to search for a progress line."""


def status(api: Api, name: str | None = None, *, as_json: bool = False) -> str:
    """Return the text to print."""
    objects = {kind: _objects(api, kind, name) for kind in ("rayclusters", "rayjobs")}
    clusters = [cluster_state(raycluster) for raycluster in objects["rayclusters"]]
    jobs = sorted(map(job_state, objects["rayjobs"]), key=lambda job: (job.started is None, str(job.started), job.name))
    if name and not clusters and not jobs:
        raise UserError(f"status: no RayJob or RayCluster {name!r} in namespace {api.namespace!r}; see sdp status")
    events = [event for kind in objects.values() for object_ in kind for event in _events(api, object_)] if name else []
    if as_json:
        data = {"clusters": list(map(_shown, clusters)), "jobs": list(map(_shown, jobs))}
        return json.dumps({**data, "events": events} if name else data, indent=2, default=datetime.isoformat)
    parts = [clusters_table(clusters), jobs_table(jobs, datetime.now(UTC))]
    if name:
        states: list[ClusterState | JobState] = [*clusters, *jobs]
        parts += [f"{state.name}: {state.message}" for state in states if len(state.message) > _LONGEST_MESSAGE]
        lines = [f"  {event['at']}  {event['reason']}: {event['message']}" for event in events]
        parts.append("\n".join(["events:", *lines]) if lines else "")
    parts += [f"{job.name}: {line}" for job in jobs if (line := _progress(api, job))]
    if name:
        commands = [f"sdp logs {job.name}{'' if job.finished else ' --follow'}" for job in jobs if job.submission]
        parts += [f"{command} shows its log" for command in commands]
    return "\n\n".join(part for part in parts if part) or (
        f"nothing in namespace {api.namespace!r}; helm install sdp charts/sdp-cluster, or use another --namespace"
    )


def _shown(state: ClusterState | JobState) -> dict[str, Any]:
    """Return the fields of a state that --json prints."""
    return {name: value for name, value in asdict(state).items() if name not in ("finished", "exit_code", "refused")}


def _progress(api: Api, job: JobState) -> str:
    """Return the newest progress line in a running job's log, with its time left; empty if there is none."""
    if job.state != "running" or not job.submission:
        return ""
    log = io.BytesIO()
    with suppress(SdpError):
        logs(api, job.name, lambda _: None, lines=_LAST_LINES, out=log)
    kind = kind_of(job.job)
    lines = [line for line in log.getvalue().decode("utf-8", "replace").splitlines() if line.startswith(f"{kind}: ")]
    return next((line for line in reversed(lines) if " · " in line), "")


def _objects(api: Api, kind: str, name: str | None) -> list[Object]:
    try:
        return [api.get(api.path(kind, name))] if name else api.list(api.path(kind))
    except Missing:
        return []


def clusters_table(clusters: list[ClusterState]) -> str:
    """Return a table of clusters."""
    rows = [
        (cluster.name, cluster.state, f"{cluster.workers} of {cluster.wanted}", cluster.head, _short(cluster.message))
        for cluster in clusters
    ]
    return table(rows, ("CLUSTER", "STATE", "WORKERS", "HEAD", "MESSAGE")) if rows else ""


def jobs_table(jobs: list[JobState], now: datetime) -> str:
    """Return a table of jobs."""
    rows = [
        (job.name, job.state, _started(job), _took(job, now), job.attempts, job.cluster, _short(job.message))
        for job in jobs
    ]
    return table(rows, ("JOB", "STATE", "STARTED", "TOOK", "ATTEMPTS", "CLUSTER", "MESSAGE")) if rows else ""


def _events(api: Api, item: Object) -> list[dict[str, str]]:
    """Return the latest events of an object, oldest first."""
    path, selector = api.path("events", group="/api/v1"), f"involvedObject.uid={item['metadata']['uid']}"
    try:
        items = api.list(path, fieldSelector=selector)
    except Forbidden:
        return []
    events = [
        {
            "at": item.get("lastTimestamp") or item.get("eventTime") or item["metadata"].get("creationTimestamp") or "",
            "reason": item.get("reason") or "",
            "message": one_line(item.get("message") or ""),
        }
        for item in items
    ]
    return sorted(events, key=lambda event: event["at"])[-_EVENTS:]


def _started(job: JobState) -> str:
    return job.started.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ") if job.started else "-"


def _took(job: JobState, now: datetime) -> str:
    seconds = job.took_s(now)
    return "-" if seconds is None else duration(seconds)


def _short(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…"
