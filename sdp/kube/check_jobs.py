"""Checks of the jobs' configurations: syntax, GPUs in the cluster, and access to storage and models.

Storage and models are reached with the credentials of the user who runs the check.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sdp.config import JOBS, JobConfig, Range, TrainConfig, draft, keys
from sdp.errors import AccessDenied, ConfigError, NotFound, SdpError
from sdp.kube import Object
from sdp.kube.clusters import accelerator_of, gpus_of_pod, pods_wanted
from sdp.kube.rayjob import kind_of
from sdp.kube.site import Finding, failed, ok, warning
from sdp.kube.submit import as_file
from sdp.model import sources
from sdp.model.family import Family
from sdp.plan.memory import fit
from sdp.storage import list_source, open_source, open_storage

PROBE = "sdp-doctor-"
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job's configuration, some keys of which may be missing."""

    name: str
    job: str
    config: JobConfig
    missing: frozenset[str]

    def value(self, path: str) -> Any:
        """Return a key's value; None if it is not set."""
        value: Any = None if path in self.missing else self.config
        for part in path.split("."):
            value = getattr(value, part, None)
        return value


def read(texts: Mapping[str, str]) -> tuple[list[JobDraft], list[Finding]]:
    """Load the configurations; return those that load, and findings on the others."""
    drafts, findings = [], []
    for name, text in texts.items():
        if (kind := kind_of(name)) not in JOBS:
            continue
        try:
            with as_file(name, text) as file:
                loaded = draft(kind, file)
        except ConfigError as error:
            problems = "; ".join(str(problem) for problem in error.problems)
            findings.append(failed("jobs", f"{name}.yaml: {problems}", "fix `jobs` of the chart's values"))
            continue
        drafts.append(JobDraft(name, kind, loaded.config, loaded.missing))
        if loaded.missing:
            detail = f"{name}.yaml: {', '.join(sorted(loaded.missing))} not set"
            findings.append(warning("jobs", detail, "set it in the values, or with sdp submit --set"))
    if drafts and not findings:
        findings.append(ok("jobs", f"{len(drafts)} configurations load: {', '.join(job.name for job in drafts)}"))
    return drafts, findings


def accelerators(drafts: list[JobDraft], cluster: Object | None) -> Iterator[Finding]:
    """Check that groups have the accelerators that jobs select, and as many as they need."""
    if cluster is None:
        return
    gpus = gpus_of(cluster)
    have = ", ".join(sorted(gpus)) or "none"
    wanted = [
        (f"{job.name}.yaml: {key.path}", accelerator)
        for job in drafts
        for key in keys(type(job.config))
        if key.path.endswith("accelerator") and (accelerator := job.value(key.path)) not in (None, "cpu", "gpu")
    ]
    for key, accelerator in wanted:
        if accelerator not in gpus:
            detail = f"{key}: no group of the cluster has {accelerator} (they have {have})"
            yield failed("placement", detail, "add a group, or set it to one of these or to cpu")
            return
    shortages = [finding for job in drafts for finding in _shortages(job, gpus)]
    yield from shortages
    if wanted and not shortages:
        yield ok("placement", "the groups have the accelerators that jobs select, and as many as they need")


def gpus_of(cluster: Object) -> dict[str, int]:
    """Return the GPUs of each accelerator that a cluster may grow to, or has if it does not grow."""
    grows = bool(cluster["spec"].get("enableInTreeAutoscaling"))
    gpus: dict[str, int] = {}
    for group in cluster["spec"].get("workerGroupSpecs") or ():
        fixed = None if grows else group.get("replicas")
        pods = pods_wanted(group)[1] if fixed is None else int(fixed) * int(group.get("numOfHosts") or 1)
        count = gpus_of_pod(group["template"]["spec"]) * pods
        if (label := accelerator_of(group)) and count:
            gpus[label] = gpus.get(label, 0) + count
    return gpus


def _shortages(job: JobDraft, gpus: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a finding if a job needs more GPUs than the groups have.

    Trainers come first, since they start together or not at all; encoders and generators work with what is left.
    Workers that name no accelerator do not count, since they may run without GPUs.
    """
    left = dict(gpus)
    sections = ("scaling", "encode") if job.job != "train" or job.value("data.mode") == "online" else ("scaling",)
    for section in sections:
        accelerator, workers = job.value(f"{section}.accelerator"), job.value(f"{section}.num_workers")
        if accelerator in (None, "cpu", "gpu") or workers is None:
            continue
        count = workers.min if isinstance(workers, Range) else workers
        per_worker = job.value(f"{section}.gpus_per_worker") or 1.0
        free, needed = left.get(accelerator, 0), count * per_worker
        left[accelerator] = max(0, free - math.ceil(needed))
        detail = (
            f"{job.name}.yaml: {section}.num_workers: {count} on {accelerator} need {needed:g} GPUs, "
            f"and the groups grow to {free:g}"
        )
        together = section == "scaling" and job.job == "train"
        if free < (needed if together else min(needed, math.ceil(per_worker))):
            beside = " beside the trainers" if free < gpus.get(accelerator, 0) else ""
            yield failed("placement", f"{detail}{beside}: they cannot start", "raise maxReplicas, or lower num_workers")
        elif free < needed:
            yield warning("placement", f"{detail}: fewer will run", "raise maxReplicas, or lower num_workers")


def memory(drafts: list[JobDraft]) -> Iterator[Finding]:
    """Check that trainers fit the accelerator that they select, if the model can be read from here."""
    for job in drafts:
        source = job.value("model.source")
        if not isinstance(job.config, TrainConfig) or source is None or not job.config.scaling.gpu_type:
            continue
        options = replace(job.config.storage.options(), timeout_s=TIMEOUT_S, retries=1)
        with suppress(SdpError):  # `access` reports problems with the model
            model = sources.family(source, storage=options)
            for phase in job.config.phases:
                yield from _fits(job.name, phase, model)


def _fits(name: str, phase: TrainConfig, model: Family | None) -> Iterator[Finding]:
    check = f"{name} memory at {phase.data.resolution} px"
    try:
        if problem := fit(phase, model, embedded=True):  # a lower bound: the dataset may hold embeddings
            yield warning(check, problem)
        elif model is not None:
            yield ok(check, f"{phase.data.batch_size} a GPU fit {phase.scaling.accelerator}")
    except ConfigError as error:
        yield failed(check, str(error))


def access(drafts: list[JobDraft], *, in_pod: bool) -> Iterator[Finding]:
    """Check that sources and models can be read from here, and outputs written."""
    tried: set[tuple[str, str]] = set()
    for path, probe in (("source.uri", _readable), ("output.uri", _writable), ("model.source", _has_model)):
        for job in drafts:
            uri = job.value(path)
            if uri is not None and (path, uri) not in tried:
                tried.add((path, uri))
                yield _probe(job, path, uri, probe, in_pod=in_pod)


def _probe(job: JobDraft, path: str, uri: str, probe: Callable[[str, Any], str], *, in_pod: bool) -> Finding:
    check, origin = f"{job.name} {path}", "from this pod" if in_pod else "from here"
    if probe is _has_model and not in_pod and sources.parse(uri).kind == "local":
        return warning(check, f"{uri} is a local folder, which each pod would look for on its own disk", "use s3://")
    try:
        detail = probe(uri, replace(job.config.storage.options(), timeout_s=TIMEOUT_S, retries=1))
    except SdpError as error:
        if isinstance(error, NotFound) and probe is _readable and job.job != "download":
            return ok(check, f"{uri} does not exist yet: an earlier job writes it")
        if isinstance(error, AccessDenied) and not in_pod:
            remedy = "pods have other credentials: run sdp doctor in the head's pod to be sure"
            return warning(check, f"{error} ({origin})", remedy)
        return failed(check, f"{error} ({origin})")
    return ok(check, f"{uri} {detail} ({origin})")


def _readable(uri: str, options: Any) -> str:
    if uri.partition("://")[0] in ("http", "https", "hf") or uri.endswith(".parquet") or "*" in uri:
        files = list_source(uri, options)
        with open_source(files[0].uri, options) as file:
            file.read(4)
        return f"can be read: {len(files)} file{'s' * (len(files) != 1)}"
    names = open_storage(uri, options).names()
    if not names:
        raise NotFound(f"{uri}: empty or missing")
    return f"can be listed: {len(names)} objects"


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
