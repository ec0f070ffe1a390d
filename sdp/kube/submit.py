"""`sdp submit`: creates a job's RayJob, on an existing cluster or one of its own, and follows it."""

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from sdp.config import JOBS, JobConfig, draft, keys, load
from sdp.errors import SdpError, UserError
from sdp.kube import Object, Say
from sdp.kube.api import AlreadyThere, Api, Forbidden, Missing, Unreachable
from sdp.kube.clusters import find_cluster, job_texts, jobs_map
from sdp.kube.logs import follow
from sdp.kube.own_cluster import with_own_cluster
from sdp.kube.rayjob import DEFAULT_CLUSTER, JOBS_FOLDER, LARGEST_CONFIG, checked_job, kind_of, make_rayjob
from sdp.kube.state import BY_LABEL, job_state

WHO_AM_I = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
LONGEST_LABEL = 63
"""Kubernetes' limit for a label's value."""
RETRIED = ("download", "score", "caption", "process")
"""The jobs that take --only-failed."""
TRIES, PAUSE_S = 20, 1.0
"""Requests to create a RayJob, while an earlier one of its name is deleted or the server is silent."""


ReadRelease = tuple[Object, Mapping[str, str] | None]
"""A RayCluster, and its job configurations unless they may not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to submit, from the command line."""

    job: str
    """A kind (train), or a kind and the name of one of the cluster's configurations (train-online)."""
    config: str | None = None
    """A configuration file; None uses the cluster's own."""
    overrides: Sequence[str] = ()
    cluster: str | None = None
    name: str | None = None
    own_cluster: bool = False
    """Run the job on a cluster of its own, made like the RayCluster."""
    follow: bool = True
    only_failed: bool = False
    """Retry the rows that failed."""


def submit(api: Api, submission: Submission, say: Say) -> int:
    """Submit a job; return its exit code if it is followed, else 0."""
    rayjob = rayjob_of(submission, partial(_release, api, submission, say), say, send=True)
    if user := _user(api):
        rayjob["metadata"]["labels"][BY_LABEL] = user
    name = create(api, rayjob, say)
    selected = rayjob["spec"].get("clusterSelector")
    where = f"cluster {selected['ray.io/cluster']!r}" if selected else "its own cluster"
    say(f"submitted {name} to {where} in namespace {api.namespace!r}")
    if not submission.follow:
        say(f"sdp logs {name} --follow shows its log, sdp status {name} its state, sdp stop {name} ends it")
        return 0
    return follow(api, name, say)


def _user(api: Api) -> str:
    """Return who the API server takes us for, as a label's value; empty where it does not say."""
    with contextlib.suppress(SdpError):
        review = api.post(WHO_AM_I, {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
        name = review["status"]["userInfo"]["username"]
        return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[-LONGEST_LABEL:].strip("-_.")
    return ""


def rayjob_of(
    submission: Submission, read_release: Callable[[], ReadRelease] | None, say: Say, *, send: bool = False
) -> Object:
    """Return the RayJob of a submission.

    Without `read_release`, as in a dry run, this checks --config or --set alone. With `send`, the RayJob carries the
    cluster's configuration, since the pods' own copy is out of date for a minute after a change.
    """
    text, config = _checked_file(submission, say)
    kind = kind_of(submission.job)
    if submission.only_failed and kind not in RETRIED:
        raise UserError(f"--only-failed: expected {', '.join(RETRIED)}, which count rows that failed, got {kind}")
    unread: ReadRelease = ({"metadata": {"name": submission.cluster or DEFAULT_CLUSTER}}, None)
    cluster, texts = read_release() if read_release else unread
    if config is None and texts is not None:
        config = _checked_from_cluster(texts, submission, say)
        if send and len(texts[submission.job].encode()) <= LARGEST_CONFIG:
            text = texts[submission.job]
    name: str = cluster["metadata"]["name"]
    rayjob = make_rayjob(submission, text, name)
    if not submission.own_cluster:
        return rayjob
    if read_release is None or config is None:
        raise UserError("--own-cluster: expected --manifest FILE with --dry-run, which asks no cluster, got none")
    return with_own_cluster(rayjob, cluster, config)


def _release(api: Api, submission: Submission, say: Say) -> ReadRelease:
    cluster = find_cluster(api, submission.cluster)
    try:
        return cluster, (None if submission.config else job_texts(api, cluster))
    except Forbidden:
        if submission.own_cluster:
            raise
        say(f"no right to read ConfigMap {jobs_map(cluster)!r}: before the job starts, only --set is checked")
        return cluster, None


def create(api: Api, rayjob: Object, say: Say) -> str:
    """Create a RayJob once, even if a response is lost, and replace a finished one; return its name."""
    name: str = rayjob["metadata"]["name"]
    path, unsure, replaced, deleting = api.path("rayjobs", name), False, False, ""
    for attempt in range(TRIES):
        try:
            api.post(api.path("rayjobs"), rayjob)
            return name
        except AlreadyThere:
            if unsure:  # the request whose response was lost succeeded
                return name
            with contextlib.suppress(Missing):
                state = job_state(api.get(path))
                if state.state == "deleting":
                    replaced, deleting = True, f": it is {state.message}"
                if not replaced and not state.finished:
                    raise UserError(
                        f"--name: RayJob {name!r} has not ended; "
                        f"sdp logs {name} --follow shows it, sdp stop {name} ends it"
                    ) from None
                if not replaced:
                    say(f"{name} has run before and is created again: it continues from storage")
                    api.delete(path)
            replaced = True
        except Unreachable:
            if attempt == TRIES - 1:
                raise
            unsure = True
        time.sleep(PAUSE_S)
    raise UserError(
        f"--name: RayJob {name!r} could not be created{deleting}; see sdp status {name}, or use another name"
    )


def _checked_file(submission: Submission, say: Say) -> tuple[str | None, JobConfig | None]:
    """Check the job's name and its configuration file with the overrides; return the file's text and configuration.

    Without a file, check the names and types of the overrides, except for items of lists, which only the cluster has.
    """
    kind = kind_of(checked_job(submission.job, tuple(JOBS)))
    if submission.config is None:
        named = [override for override in submission.overrides if not re.search(r"\.\d", override.partition("=")[0])]
        draft(kind, None, named, part=True)
        return None, None
    config = load(kind, submission.config, submission.overrides)
    text = Path(submission.config).read_text(encoding="utf-8-sig")
    _check_places(load(kind, "", submission.overrides, text=text), say)  # as pods read it: no path is beside its file
    return text, config


def _checked_from_cluster(texts: Mapping[str, str], submission: Submission, say: Say) -> JobConfig:
    """Return the job's configuration among the cluster's `texts`, with the overrides, once checked."""
    job = submission.job
    if job not in texts:
        have = ", ".join(sorted(texts)) or "none"
        raise UserError(f"--config: required, since the cluster has no {JOBS_FOLDER}/{job}.yaml (it has {have})")
    config = load(kind_of(job), f"{JOBS_FOLDER}/{job}.yaml", submission.overrides, text=texts[job])
    _check_places(config, say)
    return config


def _check_places(config: JobConfig, say: Say) -> None:
    """Refuse folders that only this machine can mean; mention those that every pod must have."""
    for key in keys(type(config)):
        value = attrgetter(key.path)(config)
        if not (isinstance(value, str) and key.path.endswith(("source", "uri", "checkpoint"))):
            continue
        if value.startswith(("/", "file://")):
            say(f"{key.path}: {value} is a local path, which each pod looks for on its own disk; use s3:// or gs://")
        elif "://" not in value and key.path.endswith("uri"):
            raise UserError(
                f"{key.path}: {value} is on this machine; use s3:// or gs://, which sdp init --store writes, "
                "or a path that every pod mounts"
            )
