"""`sdp submit`: create a job's RayJob on a cluster that stands, and follow it."""

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sdp.config import JOBS, JobConfig, draft, keys, load
from sdp.errors import UserError
from sdp.kube import Object, Say
from sdp.kube.api import AlreadyThere, Api, Forbidden, Missing, Unreachable, pause
from sdp.kube.clusters import find_cluster, job_texts, jobs_map
from sdp.kube.follow import follow
from sdp.kube.rayjob import (
    DEFAULT_CLUSTER,
    RayJobOptions,
    as_yaml,
    checked_job,
    checked_name,
    kind_of,
    make_rayjob,
    with_name,
)
from sdp.kube.state import cluster_state, job_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to submit, as the command line describes it."""

    job: str
    """A kind (train), or a kind and a name as the cluster's configurations have them (train-online)."""
    config: str | None = None
    """A configuration file; None takes the cluster's own."""
    overrides: Sequence[str] = ()
    cluster: str | None = None
    name: str | None = None
    follow: bool = True


def submit(api: Api, submission: Submission, say: Say, out: BinaryIO | None = None) -> int:
    """Submit a job; returns its exit code where it is followed, else 0."""
    checked_job(submission.job, tuple(JOBS))
    if submission.name is not None:
        checked_name(submission.name)
    text = _checked_file(submission, say)
    cluster = find_cluster(api, submission.cluster)
    if text is None:
        _check_against(api, cluster, submission, say)
    where = cluster["metadata"]["name"]
    options = RayJobOptions(cluster=where, name=submission.name, overrides=submission.overrides)
    rayjob = make_rayjob(submission.job, text, options)
    state = cluster_state(cluster)
    if state.state != "ready":
        why = f": {state.message}" if state.message else ""
        say(f"the cluster {where!r} is {state.state}{why}; the job waits for it")
    _mention_others(api, submission, where, say)
    name = create(api, rayjob, say)
    say(f"submitted {name} to cluster {where!r} in namespace {api.namespace!r}")
    if not submission.follow:
        say(f"sdp logs {name} --follow shows what it does, sdp status {name} how it is, sdp stop {name} ends it")
        return 0
    return follow(api, name, out or sys.stdout.buffer, say)


def dry_run(submission: Submission, say: Say) -> str:
    """Return the RayJob as YAML, for kubectl create; no cluster is asked: without --config, only --set is checked."""
    checked_job(submission.job, tuple(JOBS))
    cluster = submission.cluster or DEFAULT_CLUSTER
    options = RayJobOptions(cluster=cluster, name=submission.name, overrides=submission.overrides)
    return as_yaml(make_rayjob(submission.job, _checked_file(submission, say), options))


def create(api: Api, rayjob: Object, say: Say) -> str:
    """Create a RayJob, once, even where an answer is lost, and replace a finished one; returns its name."""
    rayjob = with_name(rayjob)
    name: str = rayjob["metadata"]["name"]
    unsure = False
    for attempt in range(api.timing.attempts + 1):
        try:
            api.post(api.mine("rayjobs"), rayjob)
            return name
        except AlreadyThere:
            if unsure:  # the answer that was lost was a yes
                return name
            _make_room(api, name, say)
        except Unreachable:
            if attempt == api.timing.attempts:
                raise
            unsure = True
            pause(api.timing.pause(attempt))
    raise UserError(f"--name: the finished RayJob {name!r} does not go away; delete it, or take another name")


def _make_room(api: Api, name: str, say: Say) -> None:
    with contextlib.suppress(Missing):
        existing = api.get(api.mine("rayjobs", name))
        if not job_state(existing).finished:
            raise UserError(
                f"--name: RayJob {name!r} has not ended; sdp logs {name} --follow shows it, sdp stop {name} ends it"
            )
        say(f"{name} has run before and is made anew: it continues from storage")
        api.delete(api.mine("rayjobs", name))
        api.changed(api.mine("rayjobs"), existing, 10.0)


def _checked_file(submission: Submission, say: Say) -> str | None:
    """Return the configuration file's text, if there is one, and the job accepts it with the overrides.

    Without a file, check the names and types of the overrides; items of a list are in the cluster's file alone.
    """
    if submission.config is None:
        named = [each for each in submission.overrides if not re.search(r"\.\d", each.partition("=")[0])]
        draft(kind_of(submission.job), None, named, part=True)
        return None
    _mention_local_paths(load(kind_of(submission.job), submission.config, submission.overrides), say)
    return Path(submission.config).read_text(encoding="utf-8-sig")


def _check_against(api: Api, cluster: Object, submission: Submission, say: Say) -> None:
    """Refuse what the job would refuse, if we may read the cluster's configurations."""
    name, where, job = jobs_map(cluster), cluster["metadata"]["name"], submission.job
    if name is None:
        raise UserError(f"--config: needed, since cluster {where!r} has no configurations of its own at /etc/sdp/jobs")
    try:
        texts = job_texts(api, cluster)
    except Forbidden:
        say(f"the ConfigMap {name!r} may not be read: of the configuration only --set is checked before the job starts")
        return
    if job not in texts:
        have = ", ".join(sorted(texts)) or "none"
        raise UserError(f"--config: needed, since ConfigMap {name!r} has no {job}.yaml (it has {have})")
    with as_file(job, texts[job]) as file:
        _mention_local_paths(load(kind_of(job), file, submission.overrides), say)


@contextlib.contextmanager
def as_file(name: str, text: str) -> Iterator[str]:
    """Write a text to a temporary file, for readers of files."""
    with tempfile.TemporaryDirectory(prefix="sdp-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        yield str(path)


def local_paths(config: JobConfig) -> dict[str, str]:
    """Return the keys of a configuration that name a place on one machine, which each pod looks for on its own disk."""
    paths = {}
    for key in keys(type(config)):
        if key.path.endswith(("source", "uri", "checkpoint")):
            value: object = config
            for part in key.path.split("."):
                value = getattr(value, part, None)
            if isinstance(value, str) and value.startswith(("/", "./", "../", "~", "file://")):
                paths[key.path] = value
    return paths


def _mention_local_paths(config: JobConfig, say: Say) -> None:
    for path, value in local_paths(config).items():
        say(f"{path}: {value} is a local path, which each pod looks for on its own disk; s3:// or gs:// is for all")


def _mention_others(api: Api, submission: Submission, cluster: str, say: Say) -> None:
    """Two jobs may not write one output; the second one would find out only when it runs."""
    kind = kind_of(submission.job)
    others = api.list(api.mine("rayjobs"), labelSelector=f"sdp/job={kind}")
    for state in map(job_state, others):
        if not state.finished and state.cluster == cluster and state.name != submission.name:
            say(f"{state.name} does {kind}, too, and is {state.state}; where both write one output, one is refused")
