"""`sdp submit`: make a job's RayJob on a cluster that is there, and follow it."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sdp.config import JOBS, JobConfig, keys, load
from sdp.errors import UserError
from sdp.kube import wire
from sdp.kube.answers import AlreadyThere, Forbidden, Missing, Unreachable
from sdp.kube.api import Api, Object
from sdp.kube.clusters import find_cluster, job_texts, jobs_map
from sdp.kube.follow import follow
from sdp.kube.rayjob import USUAL_CLUSTER, Options, as_yaml, checked_job, checked_name, kind_of, make_rayjob, named
from sdp.kube.state import cluster_state, job_state

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a person asked for."""

    job: str
    """A kind (train), or a kind and a name as the cluster's configurations have them (train-online)."""
    config: str | None = None
    """A file of the configuration; None takes the cluster's own."""
    overrides: Sequence[str] = ()
    cluster: str | None = None
    name: str | None = None
    follow: bool = True


def submit(api: Api, wish: Submission, say: Say, out: BinaryIO | None = None) -> int:
    """Submit a job; returns its exit code where it is followed, else 0."""
    checked_job(wish.job, tuple(JOBS))
    if wish.name is not None:
        checked_name(wish.name)
    text = _checked_file(wish, say) if wish.config is not None else None
    cluster = find_cluster(api, wish.cluster)
    if text is None:
        _check_against(api, cluster, wish, say)
    where = cluster["metadata"]["name"]
    rayjob = make_rayjob(wish.job, text, Options(cluster=where, name=wish.name, overrides=wish.overrides))
    state = cluster_state(cluster)
    if state.state != "ready":
        why = f": {state.message}" if state.message else ""
        say(f"the cluster {where!r} is {state.state}{why}; the job waits for it")
    _tell_of_others(api, wish, where, say)
    made = create(api, rayjob, say)
    name = made["metadata"]["name"]
    say(f"submitted {name} to cluster {where!r} in namespace {api.namespace!r}")
    if not wish.follow:
        say(f"sdp logs {name} --follow shows what it does, sdp status {name} how it is, sdp stop {name} ends it")
        return 0
    return follow(api, name, out or sys.stdout.buffer, say)


def written(wish: Submission, say: Say) -> str:
    """The RayJob as YAML, for kubectl create; nobody is asked, so a configuration of the cluster's is not checked."""
    checked_job(wish.job, tuple(JOBS))
    text = _checked_file(wish, say) if wish.config is not None else None
    options = Options(cluster=wish.cluster or USUAL_CLUSTER, name=wish.name, overrides=wish.overrides)
    return as_yaml(make_rayjob(wish.job, text, options))


def create(api: Api, rayjob: Object, say: Say) -> Object:
    """Make a RayJob, once, also where the answer is lost. A finished one of the same name makes room for it."""
    path, wanted = api.mine("rayjobs"), named(rayjob)
    name = wanted["metadata"]["name"]
    unsure = False
    for attempt in range(api.timing.attempts + 1):
        try:
            made: Object = api.post(path, wanted)
            return made
        except AlreadyThere:
            if unsure:  # the answer that was lost was a yes
                there: Object = api.get(api.mine("rayjobs", name))
                return there
            _make_room(api, name, say)
        except Unreachable:
            if attempt == api.timing.attempts:
                raise
            unsure = True
            wire.pause(api.timing.pause(attempt))
    raise UserError(f"--name: the finished RayJob {name!r} does not go away; delete it, or take another name")


def _make_room(api: Api, name: str, say: Say) -> None:
    try:
        there = api.get(api.mine("rayjobs", name))
        if not job_state(there).finished:
            raise UserError(
                f"--name: RayJob {name!r} has not ended; sdp logs {name} --follow shows it, sdp stop {name} ends it"
            )
        say(f"{name} has run before and is made anew: it continues from storage")
        api.delete(api.mine("rayjobs", name))
        api.changed(api.mine("rayjobs"), there, 10.0)
    except Missing:
        return


def _checked_file(wish: Submission, say: Say) -> str:
    """The file's text, if the job takes it with the overrides."""
    assert wish.config is not None, "the caller has looked"
    _tell_of_local_paths(load(kind_of(wish.job), wish.config, wish.overrides), say)
    return Path(wish.config).read_text(encoding="utf-8-sig")


def _check_against(api: Api, cluster: Object, wish: Submission, say: Say) -> None:
    """Refuse what the job would refuse, if we may read the cluster's configurations."""
    name, where = jobs_map(cluster), cluster["metadata"]["name"]
    if name is None:
        raise UserError(f"--config: needed, since cluster {where!r} has no configurations of its own at /etc/sdp/jobs")
    try:
        texts = job_texts(api, cluster)
    except Forbidden:
        say(f"the ConfigMap {name!r} may not be read, so the configuration is not checked before the job starts")
        return
    if wish.job not in texts:
        have = ", ".join(sorted(texts)) or "none"
        raise UserError(f"--config: needed, since ConfigMap {name!r} has no {wish.job}.yaml (it has {have})")
    with as_file(wish.job, texts[wish.job]) as file:
        _tell_of_local_paths(load(kind_of(wish.job), file, wish.overrides), say)


@contextlib.contextmanager
def as_file(name: str, text: str) -> Iterator[str]:
    """A text as a file for a moment, for those who read files."""
    with tempfile.TemporaryDirectory(prefix="sdp-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        yield str(path)


def local_paths(config: JobConfig) -> dict[str, str]:
    """The keys of a configuration that name a place on one machine, which each pod looks for on its own disk."""
    values = config.model_dump(mode="json")
    found = {}
    for key in keys(type(config)):
        if key.path.endswith(("source", "uri", "checkpoint")):
            value: Any = values
            for part in key.path.split("."):
                value = value[part] if isinstance(value, dict) else None
            if isinstance(value, str) and _is_local(value):
                found[key.path] = value
    return found


def _is_local(value: str) -> bool:
    return value.startswith(("/", "./", "../", "~", "file://"))


def _tell_of_local_paths(config: JobConfig, say: Say) -> None:
    for path, value in local_paths(config).items():
        say(f"{path}: {value} is a local path, which each pod looks for on its own disk; s3:// or gs:// is for all")


def _tell_of_others(api: Api, wish: Submission, cluster: str, say: Say) -> None:
    """Two jobs may not write one output; the second one would find out only when it runs."""
    kind = kind_of(wish.job)
    others = api.list(api.mine("rayjobs"), labelSelector=f"sdp/job={kind}")
    for state in map(job_state, others):
        if not state.finished and state.cluster == cluster and state.name != wish.name:
            say(f"{state.name} does {kind}, too, and is {state.state}; where both write one output, one is refused")
