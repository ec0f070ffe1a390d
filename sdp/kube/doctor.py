"""`sdp doctor`: checks for the usual problems of a cluster, before money is spent.

Each check looks at one thing. None changes anything, except that an object of 64 bytes is written to each output and
deleted again.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from sdp.errors import SdpError
from sdp.kube import Finding, Object, check_cluster, check_jobs
from sdp.kube.api import Api, Forbidden
from sdp.kube.clusters import Release, job_texts
from sdp.kube.rayjob import JOBS_FOLDER

T = TypeVar("T")


def mounted_texts(folder: Path = Path(JOBS_FOLDER)) -> dict[str, str]:
    """Return the jobs' configurations in a pod of the chart; {} elsewhere."""
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.yaml"))}


def examine_pod(texts: Mapping[str, str]) -> Iterator[Finding]:
    """Check the jobs from inside a pod of the chart, with its credentials; it has no account at the API server."""
    yield Finding("server", "warning", "the checks of Kubernetes are skipped in a pod")
    drafts, findings = check_jobs.read(texts)
    yield from findings
    yield from check_jobs.access(drafts, in_pod=True)


def examine(
    connect: Callable[[], Api],
    cluster_name: str | None = None,
    rendered: Release | None = None,
    made: Collection[str] = (),
) -> Iterator[Finding]:
    """Check a cluster as it exists, or as rendered manifests with what is `made` by them would create it."""
    try:
        api = connect()
        version = api.get("/version").get("gitVersion", "of unknown version")
    except SdpError as error:
        if rendered is None:
            yield Finding("server", "failed", str(error))
            return
        yield Finding("server", "warning", f"operator, nodes, storage and models are not checked: {error}")
        drafts, findings = check_jobs.read(rendered[1])
        yield from (*findings, *check_jobs.placement(drafts, rendered[0]))
        return
    where = f"context {api.context}" if api.context else "this pod's cluster"
    yield Finding("server", "ok", f"Kubernetes {version} answers ({where}, namespace {api.namespace})")
    yield from _guarded("CRDs", check_cluster.resources(api))
    yield from _guarded("operator", check_cluster.operator(api))
    if rendered is not None:
        cluster: Object | None = rendered[0]
        yield Finding("cluster", "ok", f"{rendered[0]['metadata']['name']}, from the manifests")
    else:
        cluster = yield from _guarded("cluster", check_cluster.cluster(api, cluster_name))
    if cluster is None:
        return
    yield from _guarded("accounts", check_cluster.accounts(api, cluster, made))
    yield from _guarded("groups", check_cluster.groups(api, cluster))
    drafts = (yield from _guarded("jobs", _jobs(rendered[1] if rendered else None, api, cluster))) or {}
    yield from check_jobs.placement(drafts, cluster)
    yield from check_jobs.access(drafts, in_pod=False)


def _jobs(texts: dict[str, str] | None, api: Api, cluster: Object) -> Generator[Finding, None, check_jobs.Drafts]:
    drafts, findings = check_jobs.read(job_texts(api, cluster) if texts is None else texts)
    yield from findings
    return drafts


def _guarded(name: str, check: Generator[Finding, None, T]) -> Generator[Finding, None, T | None]:
    """Yield a check's findings, or one that says why the check failed; return its result."""
    try:
        return (yield from check)
    except Forbidden as error:
        yield Finding(name, "warning", f"not checked: {error}")
    except SdpError as error:
        yield Finding(name, "failed", str(error))
    return None
