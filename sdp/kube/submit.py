"""`sdp submit`: creates a job's RayJob on an existing cluster and follows it."""

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from sdp.config import JOBS, JobConfig, draft, keys, load
from sdp.errors import UserError
from sdp.kube import Object, Say
from sdp.kube.api import AlreadyThere, Api, Forbidden, Missing, Unreachable, pause
from sdp.kube.clusters import find_cluster, job_texts, jobs_map
from sdp.kube.logs import follow
from sdp.kube.rayjob import DEFAULT_CLUSTER, as_yaml, checked_job, kind_of, make_rayjob, with_name
from sdp.kube.state import cluster_state, job_state

DELETED_POLLS = 20
"""Requests, each half second, after which a deleted RayJob is no longer waited for."""


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
    follow: bool = True


def submit(api: Api, submission: Submission, say: Say, out: BinaryIO | None = None) -> int:
    """Submit a job; return its exit code if it is followed, else 0."""
    checked_job(submission.job, tuple(JOBS))
    text = _checked_file(submission, say)
    cluster = find_cluster(api, submission.cluster)
    if text is None:
        _check_against(api, cluster, submission, say)
    where = cluster["metadata"]["name"]
    rayjob = _rayjob(submission, text, where)
    state = cluster_state(cluster)
    if state.state != "ready":
        cause = f": {state.message}" if state.message else ""
        say(f"the cluster {where!r} is {state.state}{cause}; the job waits for it")
    _mention_others(api, submission, where, say)
    name = create(api, rayjob, say)
    say(f"submitted {name} to cluster {where!r} in namespace {api.namespace!r}")
    if not submission.follow:
        say(f"sdp logs {name} --follow shows its log, sdp status {name} its state, sdp stop {name} ends it")
        return 0
    return follow(api, name, out or sys.stdout.buffer, say)


def dry_run(submission: Submission, say: Say) -> str:
    """Return the RayJob as YAML for kubectl create, without a cluster: without --config, only --set is checked."""
    checked_job(submission.job, tuple(JOBS))
    return as_yaml(_rayjob(submission, _checked_file(submission, say), submission.cluster or DEFAULT_CLUSTER))


def _rayjob(submission: Submission, text: str | None, cluster: str) -> Object:
    return make_rayjob(submission.job, text, cluster=cluster, name=submission.name, overrides=submission.overrides)


def create(api: Api, rayjob: Object, say: Say) -> str:
    """Create a RayJob once, even if a response is lost, and replace a finished one; return its name."""
    rayjob = with_name(rayjob)
    name: str = rayjob["metadata"]["name"]
    unsure = False
    for attempt in range(api.timing.attempts + 1):
        try:
            api.post(api.path("rayjobs"), rayjob)
            return name
        except AlreadyThere:
            if unsure:  # the request whose response was lost succeeded
                return name
            _make_room(api, name, say)
        except Unreachable:
            if attempt == api.timing.attempts:
                raise
            unsure = True
            pause(api.timing.pause(attempt))
    raise UserError(f"--name: the finished RayJob {name!r} is not deleted; delete it, or use another name")


def _make_room(api: Api, name: str, say: Say) -> None:
    """Delete a finished RayJob, and wait until it is gone."""
    path = api.path("rayjobs", name)
    with contextlib.suppress(Missing):
        if not job_state(api.get(path)).finished:
            raise UserError(
                f"--name: RayJob {name!r} has not ended; sdp logs {name} --follow shows it, sdp stop {name} ends it"
            )
        say(f"{name} has run before and is created again: it continues from storage")
        api.delete(path)
        for _ in range(DELETED_POLLS):
            pause(0.5)
            api.get(path)


def _checked_file(submission: Submission, say: Say) -> str | None:
    """Check the configuration file with the overrides, and return its text.

    Without a file, check the names and types of the overrides, except for items of lists, which only the cluster has.
    """
    if submission.config is None:
        named = [override for override in submission.overrides if not re.search(r"\.\d", override.partition("=")[0])]
        draft(kind_of(submission.job), None, named, part=True)
        return None
    _mention_local_paths(load(kind_of(submission.job), submission.config, submission.overrides), say)
    return Path(submission.config).read_text(encoding="utf-8-sig")


def _check_against(api: Api, cluster: Object, submission: Submission, say: Say) -> None:
    """Check the cluster's configuration with the overrides, if it may be read."""
    name, where, job = jobs_map(cluster), cluster["metadata"]["name"], submission.job
    if name is None:
        raise UserError(f"--config: required, since cluster {where!r} has no configurations in /etc/sdp/jobs")
    try:
        texts = job_texts(api, cluster)
    except Forbidden:
        say(f"no right to read ConfigMap {name!r}: before the job starts, only --set is checked")
        return
    if job not in texts:
        have = ", ".join(sorted(texts)) or "none"
        raise UserError(f"--config: required, since ConfigMap {name!r} has no {job}.yaml (it has {have})")
    with as_file(job, texts[job]) as file:
        _mention_local_paths(load(kind_of(job), file, submission.overrides), say)


@contextlib.contextmanager
def as_file(name: str, text: str) -> Iterator[str]:
    """Yield the path of a temporary file with this text."""
    with tempfile.TemporaryDirectory(prefix="sdp-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        yield str(path)


def local_paths(config: JobConfig) -> dict[str, str]:
    """Return the keys of a configuration that name local paths, and the paths."""
    paths = {}
    for key in keys(type(config)):
        if key.path.endswith(("source", "uri", "checkpoint")):
            value = attrgetter(key.path)(config)
            if isinstance(value, str) and value.startswith(("/", "./", "../", "~", "file://")):
                paths[key.path] = value
    return paths


def _mention_local_paths(config: JobConfig, say: Say) -> None:
    for path, value in local_paths(config).items():
        say(f"{path}: {value} is a local path, which each pod looks for on its own disk; use s3:// or gs://")


def _mention_others(api: Api, submission: Submission, cluster: str, say: Say) -> None:
    """Mention other jobs of the same kind: if two write the same output, the second is refused only when it runs."""
    kind = kind_of(submission.job)
    others = api.list(api.path("rayjobs"), labelSelector=f"sdp/job={kind}")
    for state in map(job_state, others):
        if not state.finished and state.cluster == cluster and state.name != submission.name:
            say(
                f"{state.name} is also a {kind} job and is {state.state}; if both write the same output, one is refused"
            )
