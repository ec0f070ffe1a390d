"""Checks of the jobs' configurations: syntax, GPUs in the cluster, and access to storage and models.

Storage and models are reached with the credentials of the user who runs the check.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sdp.config import JOBS, JobConfig, draft
from sdp.config.load import Draft
from sdp.config.train import ScalingConfig
from sdp.console import counted
from sdp.errors import AccessDenied, ConfigError, NotFound, SdpError
from sdp.kube import Finding, Object
from sdp.kube.clusters import accelerator_of, gpus_of_pod
from sdp.kube.own_cluster import workers_of
from sdp.kube.rayjob import kind_of
from sdp.model import sources
from sdp.storage import list_source, open_source, open_storage

PROBE = "sdp-doctor-"
TIMEOUT_S = 20.0


Drafts = Mapping[str, Draft]
"""Configurations by the names of their jobs."""


def read(texts: Mapping[str, str]) -> tuple[Drafts, list[Finding]]:
    """Load the configurations; return those that load, and findings on the others."""
    drafts, findings = dict[str, Draft](), list[Finding]()
    for name, text in texts.items():
        if (kind := kind_of(name)) not in JOBS:
            continue
        try:
            drafts[name] = draft(kind, f"{name}.yaml", text=text)
        except ConfigError as error:
            problems = "; ".join(map(str, error.problems))
            detail = problems if problems.startswith(f"{name}.yaml:") else f"{name}.yaml: {problems}"
            findings.append(Finding("jobs", "failed", detail, "fix `jobs` of the chart's values"))
            continue
        if missing := drafts[name].missing:
            detail = f"{name}.yaml: {', '.join(sorted(missing))} not set"
            findings.append(Finding("jobs", "warning", detail, "set it in the values, or with sdp submit --set"))
    if drafts and not findings:
        findings.append(Finding("jobs", "ok", f"{len(drafts)} configurations load: {', '.join(drafts)}"))
    return drafts, findings


def placement(drafts: Drafts, cluster: Object) -> Iterator[Finding]:
    """Check that groups have the accelerators that jobs select, and as many as they need to start."""
    have, fine = gpus_of(cluster), True
    for name, job in drafts.items():
        for accelerator, needed in _gpus_needed(job.config).items():
            if needed > (grow_to := have[accelerator]):
                fine = False
                detail = f"{name}.yaml: needs {needed:g} {accelerator} GPUs to start, and the groups grow to {grow_to}"
                remedy = "add a group, raise maxReplicas, or change accelerator and num_workers"
                yield Finding("placement", "failed", detail, remedy)
    if drafts and fine:
        yield Finding("placement", "ok", "the groups have the accelerators that jobs select, and as many as they need")


def gpus_of(cluster: Object) -> Counter[str]:
    """Return the GPUs of each accelerator that a cluster may grow to, or has if it does not grow."""
    grows = bool(cluster["spec"].get("enableInTreeAutoscaling"))
    gpus = Counter[str]()
    for group in cluster["spec"].get("workerGroupSpecs") or ():
        pods = int(group.get("maxReplicas" if grows else "replicas") or 0) * int(group.get("numOfHosts") or 1)
        gpus[accelerator_of(group)] += gpus_of_pod(group["template"]["spec"]) * pods
    return gpus


def _gpus_needed(config: JobConfig) -> Counter[str]:
    """Return the GPUs of each accelerator without which a job does not start.

    Trainers start together or not at all; one encoder or generator is enough. Workers that name no type of GPU do not
    count, since any group may have theirs.
    """
    needed = Counter[str]()
    for workers in workers_of(config):
        if workers.accelerator not in (None, "cpu", "gpu"):
            needed[workers.accelerator] += workers.least if isinstance(workers, ScalingConfig) else 1
    return needed


def access(drafts: Drafts, *, in_pod: bool) -> Iterator[Finding]:
    """Check that sources and models can be read from here, and outputs written; report each cause once."""
    tried: set[tuple[str, str]] = set()
    causes: dict[tuple[str, str], list[Finding]] = {}
    for path, probe in (("source.uri", _readable), ("output.uri", _writable), ("model.source", _has_model)):
        for name, job in drafts.items():
            uri = job.value(path)
            if uri is not None and (path, uri) not in tried:
                tried.add((path, uri))
                finding = _probe(name, job, path, probe, in_pod=in_pod)
                if finding.state == "ok":
                    yield finding
                else:
                    causes.setdefault((finding.state, finding.says.replace(uri, "")), []).append(finding)
    for first, *others in causes.values():
        also = f"; the same for {', '.join(other.check for other in others)}" if others else ""
        yield replace(first, says=f"{first.says}{also}")


def _probe(name: str, job: Draft, path: str, probe: Callable[[str, Any], str], *, in_pod: bool) -> Finding:
    check, uri = f"{name} {path}", job.value(path)
    origin = "from this pod" if in_pod else "from here"
    if probe is _has_model and not in_pod and sources.parse(uri).kind == "local":
        detail = f"{uri} is a local folder, which each pod looks for on its own disk"
        return Finding(check, "warning", detail, "use s3://")
    try:
        detail = probe(uri, replace(job.config.storage.options(), timeout_s=TIMEOUT_S, retries=1))
    except SdpError as error:
        if isinstance(error, NotFound) and probe is _readable and kind_of(name) != "download":
            return Finding(check, "ok", f"{uri} does not exist yet: an earlier job writes it")
        if isinstance(error, AccessDenied) and not in_pod:
            remedy = "pods have other credentials: run sdp doctor in the head's pod to be sure"
            return Finding(check, "warning", f"{error} ({origin})", remedy)
        return Finding(check, "failed", f"{error} ({origin})")
    return Finding(check, "ok", f"{uri} {detail} ({origin})")


def _readable(uri: str, options: Any) -> str:
    if uri.partition("://")[0] in ("http", "https", "hf") or uri.endswith(".parquet") or "*" in uri:
        files = list_source(uri, options)
        with open_source(files[0].uri, options) as file:
            file.read(4)
        return f"can be read: {len(files)} file{'s' if len(files) != 1 else ''}"
    names = open_storage(uri, options).names()
    if not names:
        raise NotFound(f"{uri}: empty or missing")
    return f"can be listed: {counted(len(names), 'object')}"


def _writable(uri: str, options: Any) -> str:
    folder = open_storage(uri, options)
    name, content = f"{PROBE}{secrets.token_hex(8)}", secrets.token_bytes(64)
    folder.create(name, content)
    try:
        if folder.read(name) != content:
            raise SdpError(f"{uri}: a test object was read back with other content")
    finally:
        folder.delete(name)
    return "can be written to, read and deleted from"


def _has_model(source: str, options: Any) -> str:
    sources.check(source, storage=options)
    return "is complete"
