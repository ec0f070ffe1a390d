"""`sdp doctor`: checks for the usual problems of a cluster, before money is spent.

Each check looks at one thing. None changes anything, except that an object of 64 bytes is written to each output and
deleted again.
"""

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Finding, Object, check_cluster, check_jobs
from sdp.kube.api import Api, Forbidden
from sdp.kube.clusters import job_texts, jobs_map, yaml_entries
from sdp.kube.rayjob import JOBS_FOLDER

T = TypeVar("T")


def mounted_texts(folder: Path = Path(JOBS_FOLDER)) -> dict[str, str]:
    """Return the jobs' configurations in a pod of the chart; {} elsewhere."""
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.yaml"))}


def examine_pod(texts: Mapping[str, str]) -> Iterator[Finding]:
    """Check the jobs in a pod of the chart, which has no account at the API server, with the pod's credentials."""
    yield Finding("server", "warning", "the checks of Kubernetes are skipped in a pod")
    drafts, findings = check_jobs.read(texts)
    yield from findings
    yield from check_jobs.access(drafts, in_pod=True)


def examine(api: Api, cluster_name: str | None = None, rendered: Sequence[Object] = ()) -> Iterator[Finding]:
    """Check a cluster as it exists, or as rendered manifests would create it."""
    try:
        version = api.get("/version").get("gitVersion", "of unknown version")
    except SdpError as error:
        yield Finding("server", "failed", str(error))
        return
    where = f"context {api.context}" if api.context else "this pod's cluster"
    yield Finding("server", "ok", f"Kubernetes {version} answers ({where}, namespace {api.namespace})")
    yield from _guarded("CRDs", check_cluster.resources(api))
    yield from _guarded("operator", check_cluster.operator(api))
    cluster = yield from _guarded("cluster", check_cluster.cluster(api, cluster_name, rendered))
    if cluster is None:
        return
    yield from _guarded("groups", check_cluster.groups(api, cluster))
    drafts = (yield from _guarded("jobs", _jobs(api, cluster, rendered))) or []
    yield from check_jobs.placement(drafts, cluster)
    yield from check_jobs.access(drafts, in_pod=False)


def _jobs(api: Api, cluster: Object, rendered: Sequence[Object]) -> Generator[Finding, None, list[check_jobs.JobDraft]]:
    maps = {item["metadata"]["name"]: item for item in rendered if item["kind"] == "ConfigMap"}
    texts = yaml_entries(maps.get(jobs_map(cluster), {})) if rendered else job_texts(api, cluster)
    drafts, findings = check_jobs.read(texts)
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


def read_manifests(file: str) -> list[Object]:
    """Read a file that `helm template` wrote; `-` is standard input."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        objects = [document for document in yaml.safe_load_all(text) if document]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--manifest: {file}: expected a file of YAML ({one_line(error)})") from error
    if not all(isinstance(document, dict) and "kind" in document for document in objects):
        raise UserError(f"--manifest: {file}: expected Kubernetes objects; helm template writes them")
    return objects
