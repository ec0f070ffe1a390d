"""Checks of what jobs are told: that their configurations load, that the cluster has what they place work on, and that
storage and models can be had, by the credentials of whoever runs the check."""

import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdp.config import JOBS, JobConfig, Range, draft, keys
from sdp.errors import AccessDenied, ConfigError, NotFound, SdpError
from sdp.kube.api import Object
from sdp.kube.check_cluster import ACCELERATOR, GPU, wanted_of
from sdp.kube.finding import Finding, failed, ok, warning
from sdp.kube.placing import requests
from sdp.kube.submit import as_file

PROBE = "sdp-doctor-"
PATIENCE_S = 20.0
_KIND = re.compile(rf"({'|'.join(JOBS)})")


@dataclass(frozen=True, slots=True)
class Told:
    """A configuration as the doctor sees it."""

    name: str
    job: str
    config: JobConfig
    missing: frozenset[str]

    def value(self, path: str) -> Any:
        """What a key is set to; None where it is not."""
        here: Any = None if path in self.missing else self.config
        for part in path.split("."):
            here = getattr(here, part, None)
        return here


def read(texts: Mapping[str, str]) -> tuple[list[Told], list[Finding]]:
    """The configurations that load, and what is wrong with the others."""
    told, findings = [], []
    for name, text in texts.items():
        kind = _KIND.match(name)
        if kind is None:
            continue
        try:
            with as_file(name, text) as file:
                found = draft(kind[1], file)
        except ConfigError as error:
            problems = "; ".join(str(problem) for problem in error.problems)
            findings.append(failed("jobs", f"{name}.yaml: {problems}", "mend `jobs` of the chart's values"))
            continue
        told.append(Told(name, kind[1], found.config, found.missing))
        if found.missing:
            still = ", ".join(sorted(found.missing))
            findings.append(
                warning("jobs", f"{name}.yaml: {still} still to be set", "in the values, or by sdp submit --set")
            )
    if told and not findings:
        findings.append(ok("jobs", f"{len(told)} configurations load: {', '.join(each.name for each in told)}"))
    return told, findings


def accelerators(told: list[Told], cluster: Object) -> Iterator[Finding]:
    """That a group has each accelerator that a job places work on."""
    room = gpus_of(cluster)
    have = set(room)
    asked = 0
    for each in told:
        for key in keys(type(each.config)):
            wanted = each.value(key.path) if key.path.endswith("accelerator") else None
            if not wanted:
                continue
            asked += 1
            if wanted not in have:
                there = ", ".join(sorted(have)) or "none"
                yield failed(
                    "placement",
                    f"{each.name}.yaml: {key.path}: {wanted}, which no group of the cluster has (they have {there})",
                    "add a group, or set it to one of these or to null",
                )
                return
    short = [finding for each in told for finding in _counted(each, room)]
    yield from short
    if asked and not short:
        yield ok("placement", "each accelerator that jobs ask for is some group's, in the number that they ask for")


def gpus_of(cluster: Object) -> dict[str, int]:
    """How many GPUs of each accelerator a cluster may grow to; one that does not grow has what it has."""
    grows = bool(cluster["spec"].get("enableInTreeAutoscaling"))
    found: dict[str, int] = {}
    for group in cluster["spec"].get("workerGroupSpecs") or ():
        label = (group.get("labels") or {}).get(ACCELERATOR, "")
        fixed = None if grows else group.get("replicas")
        pods = wanted_of(group)[1] if fixed is None else int(fixed) * int(group.get("numOfHosts") or 1)
        gpus = int(requests(group["template"]["spec"]).get(GPU, 0)) * pods
        if label and gpus:
            found[label] = found.get(label, 0) + gpus
    return found


def _counted(told: Told, room: Mapping[str, int]) -> Iterator[Finding]:
    """Whether there are as many GPUs as a job asks for: trainers begin together or not at all, others with what comes.

    A cluster of which the job says no accelerator is not counted: it may do without GPUs.
    """
    asks = list(_asks(told))
    left = dict(room)
    for ask in sorted(asks, key=lambda ask: not ask.together):
        there = left.get(ask.accelerator, 0)
        says = (
            f"{told.name}.yaml: {ask.path}: {ask.workers} on {ask.accelerator} need {ask.gpus:g} GPUs, "
            f"of which the groups grow to {there:g}"
        )
        left[ask.accelerator] = max(0, there - math.ceil(ask.gpus))
        first = ask.gpus if ask.together else min(ask.gpus, math.ceil(ask.gpus / ask.workers))
        if first > there:
            beside = " beside the trainers" if there < room.get(ask.accelerator, 0) else ""
            yield failed("placement", f"{says}{beside}: they never come", "raise maxReplicas, or lower it")
        elif ask.gpus > there:
            yield warning("placement", f"{says}: fewer will run", "raise maxReplicas, or lower it")


@dataclass(frozen=True, slots=True)
class _Ask:
    """GPUs of an accelerator that a job takes."""

    path: str
    accelerator: str
    workers: int
    gpus: float
    together: bool


def _asks(told: Told) -> Iterator[_Ask]:
    online = told.job != "train" or told.value("data.mode") == "online"
    for section in ("scaling", "encode"):
        accelerator, workers = told.value(f"{section}.accelerator"), told.value(f"{section}.num_workers")
        if not accelerator or workers is None or (section == "encode" and not online):
            continue
        least = workers.min if isinstance(workers, Range) else workers
        each = told.value(f"{section}.gpus_per_worker") or 1.0
        trainers = section == "scaling" and told.job == "train"
        yield _Ask(f"{section}.num_workers", accelerator, least, least * each, trainers)


def storage(told: list[Told], *, in_pod: bool) -> Iterator[Finding]:
    """That sources can be read and outputs written, from where we are."""
    tried: set[tuple[str, str]] = set()
    for each in told:
        for path, attempt in (("source.uri", _readable), ("output.uri", _writable)):
            uri = each.value(path)
            if uri is None or (path, uri) in tried:
                continue
            tried.add((path, uri))
            yield _tried(f"{each.name} {path}", uri, each, attempt, in_pod=in_pod)


def _tried(check: str, uri: str, told: Told, attempt: Any, *, in_pod: bool) -> Finding:
    here = "from this pod" if in_pod else "from here"
    options = replace(told.config.storage.options(), timeout_s=PATIENCE_S, retries=1)
    try:
        says = attempt(uri, options)
    except NotFound as error:
        if attempt is _readable and told.job != "download":
            return ok(check, f"{uri} is not there yet: the job before it makes it")
        return failed(check, f"{error} ({here})")
    except SdpError as error:
        do = "" if in_pod else "pods have credentials of their own: run sdp doctor in the head's pod to be sure"
        denied = isinstance(error, AccessDenied) and not in_pod
        return warning(check, f"{error} ({here})", do) if denied else failed(check, f"{error} ({here})", do)
    return ok(check, f"{uri} {says} ({here})")


def _readable(uri: str, options: Any) -> str:
    from sdp.storage import list_source, open_source, open_storage

    if uri.partition("://")[0] in ("http", "https", "hf") or uri.endswith(".parquet") or "*" in uri:
        files = list_source(uri, options)
        with open_source(files[0].uri, options) as file:
            file.read(4)
        return f"can be read: {len(files)} file{'s' * (len(files) != 1)}"
    there = open_storage(uri, options).names()
    if not there:
        raise NotFound(f"{uri}: there is nothing in it")
    return f"can be listed: {len(there)} objects"


def _writable(uri: str, options: Any) -> str:
    from sdp.storage import open_storage

    folder = open_storage(uri, options)
    name, content = f"{PROBE}{secrets.token_hex(8)}", secrets.token_bytes(64)
    folder.create(name, content)
    try:
        if folder.read(name) != content:
            raise SdpError(f"{uri}: what was written came back as something else")
    finally:
        folder.delete(name)
    return "can be written, read and deleted from"


def models(told: list[Told], *, in_pod: bool) -> Iterator[Finding]:
    """That each model that is named can be had."""
    from sdp.model.sources import check, parse

    here = "from this pod" if in_pod else "from here"
    tried: set[str] = set()
    for each in told:
        source = each.value("model.source")
        if source is None or source in tried:
            continue
        tried.add(source)
        options = replace(each.config.storage.options(), timeout_s=PATIENCE_S, retries=1)
        name = f"{each.name} model.source"
        try:
            if parse(source).kind == "local" and not in_pod:
                yield warning(
                    name, f"{source} is a folder, which each pod looks for on its own disk", "s3:// is for all"
                )
                continue
            check(source, storage=options)
        except SdpError as error:
            mine = isinstance(error, AccessDenied) and not in_pod
            do = "pods have credentials of their own: run sdp doctor in the head's pod to be sure" if mine else ""
            yield warning(name, f"{error} ({here})", do) if mine else failed(name, f"{error} ({here})", do)
        else:
            yield ok(name, f"{source} is there, with all its parts ({here})")
