"""`sdp status`: the RayClusters and RayJobs of a namespace, or one of them."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial

from sdp.console import counted, duration, table, visible
from sdp.errors import SdpError, UserError, shortened
from sdp.kube import Object
from sdp.kube.api import RAY, Api
from sdp.kube.clusters import config_of
from sdp.kube.head import RayHead
from sdp.kube.logs import runs_on, unnoticed_end
from sdp.kube.rayjob import kind_of
from sdp.kube.reasons import Reasons
from sdp.kube.state import ClusterState, JobState, cluster_state, job_state
from sdp.ray.cluster import holders

RECENT = timedelta(days=1)
"""Time after its end for which a job is shown."""
_LONGEST_MESSAGE = 60
GROUP_LABEL = "sdp/group"
"""The chart's label of a group's nodes in Ray."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The clusters and jobs of one namespace."""

    api: Api
    clusters: list[ClusterState]
    jobs: list[JobState]
    older: int
    """The number of jobs that are not shown, since they ended long ago."""
    rayjobs: list[Object]


def status(
    api: Api, name: str | None = None, *, as_json: bool = False, ended: bool = False, everywhere: bool = False
) -> str:
    """Return the text to print: of one namespace or of all, with jobs that ended long ago if `ended`."""
    apis = [api]
    since = None if ended or name else datetime.now(UTC) - RECENT
    if everywhere:
        items = [item for kind in ("rayclusters", "rayjobs") for item in api.list(f"{RAY}/{kind}")]
        apis = [api.within(each) for each in sorted({item["metadata"]["namespace"] for item in items})]
    views = [_view(each, name, since) for each in apis]
    views = [view for view in views if view.clusters or view.jobs or view.older]
    where = "any namespace" if everywhere else f"namespace {api.namespace!r}"
    if name and not views:
        raise UserError(f"status: no RayJob or RayCluster {name!r} in {where}; see sdp status")
    if as_json:
        kinds = ("clusters", "jobs")
        data = {kind: [asdict(state) for view in views for state in getattr(view, kind)] for kind in kinds}
        return json.dumps(data, indent=2, default=datetime.isoformat)
    headings = (f"namespace {view.api.namespace}:\n\n" if everywhere else "" for view in views)
    text = "\n\n".join(f"{heading}{_text(view)}" for heading, view in zip(headings, views, strict=True))
    return visible(text) or f"nothing in {where}; helm install sdp charts/sdp-cluster, or use another --namespace"


def _view(api: Api, name: str | None, since: datetime | None) -> Namespace:
    """Read a namespace: the objects of this name, or all but the jobs that ended before `since`."""
    objects = {kind: api.list(api.path(kind)) for kind in ("rayclusters", "rayjobs")}
    reasons = Reasons(api)
    known = {item["metadata"]["name"]: _explained_cluster(reasons, item) for item in objects["rayclusters"]}
    clusters = [state for state in known.values() if name in (None, state.name)]
    jobs = [_explained(reasons, job, known) for job in objects["rayjobs"] if name in (None, job["metadata"]["name"])]
    recent = [job for job in jobs if not job.finished or since is None or _last_moment(job) >= since]
    recent.sort(key=lambda job: (job.started is None, str(job.started), job.name))
    newest = sorted(objects["rayjobs"], key=lambda item: str(item["metadata"].get("creationTimestamp")), reverse=True)
    return Namespace(api, clusters, recent, len(jobs) - len(recent), newest)


def _last_moment(job: JobState) -> datetime:
    return job.ended or job.started or job.created or datetime.now(UTC)


def _text(view: Namespace) -> str:
    """Return two tables, and what does not fit into them."""
    states: list[ClusterState | JobState] = [*view.clusters, *view.jobs]
    older = f"{counted(view.older, 'older job')}: sdp status --all" if view.older else ""
    parts = [clusters_table(view.clusters), jobs_table(view.jobs, datetime.now(UTC)), older]
    long = dict[str, list[str]]()
    for state in states:
        if len(state.message) > _LONGEST_MESSAGE:
            long.setdefault(state.message, []).append(state.name)
    parts += [f"{', '.join(names)}: {message}" for message, names in long.items()]
    by = {job.name: f", submitted by {job.by}" for job in view.jobs if job.by}
    for cluster in view.clusters:
        parts += [f"{cluster.name}: {line}{by.get(line.split()[0], '')}" for line in _holders(view.api, cluster)]
    writers = cache(partial(_writers, view))
    for job in view.jobs:
        if line := _progress(view.api, job):
            parts.append(f"{job.name}: {line}{_ended_writer(line, writers)}")
    return "\n\n".join(filter(None, parts))


def _explained_cluster(reasons: Reasons, raycluster: Object) -> ClusterState:
    state = cluster_state(raycluster)
    return replace(state, message=reasons.of(raycluster, state))


def _explained(reasons: Reasons, rayjob: Object, clusters: Mapping[str, ClusterState]) -> JobState:
    """Return a job's state with what it waits for: a queue, or its cluster."""
    job = job_state(rayjob)
    reason, cluster = "", clusters.get(job.cluster)
    if job.state == "suspended":
        reason = reasons.queued(rayjob)
    elif job.state == "waiting" and cluster:
        reason = cluster.message
    elif job.state in ("running", "pending"):
        reason = (unnoticed_end(reasons.api, job) or [""])[0] if cluster else "its cluster is gone"
    elif job.state == "waiting" and job.cluster:
        reason = f"there is no RayCluster {job.cluster!r}"
    elif cluster and (advice := runs_on(reasons.api, job)):
        job, reason = replace(job, finished=False), f"{job.message}; {advice}"
    return replace(job, message="; ".join(filter(None, (job.attempt, reason)))) if reason else job


def _holders(api: Api, cluster: ClusterState) -> list[str]:
    """Return which job holds how many GPUs of each group; nothing if the head does not answer."""
    with suppress(SdpError):
        paths = ("/api/v0/actors?detail=1&limit=10000", "/api/jobs/", "/api/v0/nodes?detail=1&limit=10000")
        actors, jobs, nodes = (RayHead(api, cluster.name).listed(path) if cluster.workers else [] for path in paths)
        return holders(actors, jobs, {node["node_id"]: node["labels"].get(GROUP_LABEL, "") for node in nodes})
    return []


def _progress(api: Api, job: JobState) -> str:
    """Return the newest line of a running job's log with its time left, or what it waits for; empty without one."""
    lines: list[str] = []
    if job.state == "running":
        with suppress(SdpError):
            lines = RayHead(api, job.cluster).last_lines(job.submission)
    kind, has_begun = kind_of(job.job), False
    progress = re.compile(rf"{kind}(: (waiting for |no progress for |.* · )| is waiting: )")
    for line in reversed(lines):
        if progress.match(line):
            return "" if has_begun and line.startswith(f"{kind} is waiting: ") else line
        has_begun = has_begun or line.startswith(f"{kind}: ")
    return ""


def _writers(view: Namespace) -> dict[str, JobState]:
    """Return the newest job that writes each output."""
    newest = dict[str, JobState]()
    for rayjob in view.rayjobs:
        with suppress(SdpError):
            state = job_state(rayjob)
            if state.job:
                newest.setdefault(config_of(view.api, rayjob).output.uri.rstrip("/"), state)
    return newest


def _ended_writer(line: str, writers: Callable[[], Mapping[str, JobState]]) -> str:
    """Return a remark if the job that writes what a line waits for has ended; empty otherwise."""
    awaited = re.search(r" is waiting: for (\S+) to be complete", line)
    state = writers().get(awaited[1].rstrip("/")) if awaited else None
    return f"; {state.name}, which writes it, has ended: {state.state}" if state and state.finished else ""


def clusters_table(clusters: list[ClusterState]) -> str:
    """Return a table of clusters."""
    rows = [
        (cluster.name, cluster.state, f"{cluster.workers} of {cluster.wanted}", cluster.head, _short(cluster))
        for cluster in clusters
    ]
    return table(rows, ("CLUSTER", "STATE", "WORKERS", "HEAD", "MESSAGE")) if rows else ""


def jobs_table(jobs: list[JobState], now: datetime) -> str:
    """Return a table of jobs."""
    rows = [(job.name, job.state, *_times(job, now), job.cluster, job.by, _short(job)) for job in jobs]
    return table(rows, ("JOB", "STATE", "STARTED", "TOOK", "CLUSTER", "BY", "MESSAGE")) if rows else ""


def _times(job: JobState, now: datetime) -> tuple[str, str]:
    """Return when a job started, and how long it has taken."""
    if job.started is None:
        return "-", "-"
    took = (job.ended or now) - job.started
    return f"{job.started.astimezone(UTC):%Y-%m-%d %H:%MZ}", duration(took.total_seconds())


def _short(state: ClusterState | JobState) -> str:
    return shortened(state.message, _LONGEST_MESSAGE)
