"""The RayJob of a job: the same object as manifests/JOB.yaml, made from what a person said on the command line."""

import difflib
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sdp.errors import UserError
from sdp.kube.handover import CONFIG_ENV, CONFIG_FLAG

Object = dict[str, Any]

JOBS_FOLDER = "/etc/sdp/jobs"
"""Where the chart's cluster has its jobs' configurations."""
STOP_WAIT_ENV = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_WAIT_S = 300
"""Between being told to stop and being killed: enough for a last checkpoint. Ray's own three seconds are not."""
USUAL_CLUSTER = "sdp"
LARGEST_CONFIG = 100_000
"""Bytes. Linux allows 131,072 in one variable of an environment."""
LONGEST_NAME = 47
"""KubeRay's limit for a RayJob's name."""
_REST = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_BREAKS = frozenset("\x85\u2028\u2029")
"""Line breaks of YAML 1.1 that nobody else takes for one."""
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes the end of generated names from: nothing that could make a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may differ from the manifest."""

    cluster: str = USUAL_CLUSTER
    """The RayCluster to run on."""
    name: str | None = None
    """The RayJob's name; None has one made, JOB and five letters."""
    overrides: Sequence[str] = ()
    """As `--set` takes them; they go over the configuration, whichever it is."""


def kind_of(job: str) -> str:
    """What a job does, of whose kind the cluster may hold several configurations: train-online trains."""
    return job.partition("-")[0]


def make_rayjob(job: str, config_text: str | None = None, options: Options | None = None) -> Object:
    """The RayJob that runs a job (KIND, or KIND-NAME) under the supervisor, on a cluster that is there.

    Without a configuration of its own it runs by the cluster's, at /etc/sdp/jobs. One of its own travels in the job's
    environment, as it is: the pods run already, and nothing can be mounted into them any more.
    """
    options = options or Options()
    env = {STOP_WAIT_ENV: str(STOP_WAIT_S)}
    config = ["--config", f"{JOBS_FOLDER}/{job}.yaml"]
    if config_text is not None:
        config = [CONFIG_FLAG, CONFIG_ENV]
        env[CONFIG_ENV] = _fitting(config_text)
    sets = [word for override in options.overrides for word in ("--set", override)]
    words = ["python", "-m", "sdp.supervisor", kind_of(job), *config, *sets]
    return _rayjob(job, kind_of(job), words, env, options)


def make_all_reduce(nodes: int, gpus: int, accelerator: str, options: Options) -> Object:
    """The RayJob that measures an all-reduce between whole nodes."""
    words = ["python", "-m", "sdp.kube.allreduce", "--nodes", str(nodes), "--gpus", str(gpus)]
    return _rayjob("all-reduce", "all-reduce", [*words, "--accelerator", accelerator], {}, options)


def _rayjob(job: str, kind: str, words: Sequence[str], env: Mapping[str, str], options: Options) -> Object:
    named = {"generateName": f"sdp-{job}-"} if options.name is None else {"name": checked_name(options.name)}
    runtime = {"runtimeEnvYAML": as_yaml({"env_vars": dict(env)})} if env else {}
    if options.name is None and len(job) > LONGEST_NAME - len("sdp--12345"):
        raise UserError(
            f"--name: needed for a job with a name as long as {job!r}, of at most {LONGEST_NAME} characters"
        )
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {**named, "labels": {"app.kubernetes.io/name": "sdp", "sdp/job": kind}},
        "spec": {
            "submissionMode": "HTTPMode",
            "clusterSelector": {"ray.io/cluster": options.cluster},
            "entrypoint": shlex.join(words),
            **runtime,
        },
    }


def checked_job(job: str, kinds: Sequence[str]) -> str:
    """A job that the chart could hold a configuration of: KIND, or KIND-NAME."""
    kind, hyphen, name = job.partition("-")
    if kind not in kinds:
        near = difflib.get_close_matches(kind, kinds, 1, 0.6)
        hint = f"did you mean {near[0]}{hyphen}{name}?" if near else "see sdp submit --help"
        raise UserError(f"submit: JOB: expected {', '.join(kinds)}, or one of these and -NAME, got {job!r}; {hint}")
    if hyphen and not _REST.fullmatch(name):
        raise UserError(f"submit: JOB: expected small letters, digits and hyphens after {kind}-, got {job!r}")
    return job


def named(rayjob: Object) -> Object:
    """The same with a name of its own where one is to be made, so that to ask for it twice does not make two."""
    about = dict(rayjob["metadata"])
    prefix = about.pop("generateName", None)
    if prefix is None:
        return rayjob
    ending = "".join(secrets.choice(_SUFFIX) for _ in range(5))
    return {**rayjob, "metadata": {"name": f"{prefix}{ending}", **about}}


def checked_name(name: str) -> str:
    """A name that KubeRay takes for a RayJob."""
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise UserError(
            f"--name: expected at most {LONGEST_NAME} small letters, digits and hyphens, a letter first, got {name!r}"
        )
    return name


def as_yaml(data: Any) -> str:
    """YAML for people: text of several lines as such, keys in their order."""
    text: str = yaml.dump(data, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=10**6)
    return text


class _Readable(yaml.SafeDumper):
    """Writes text of several lines as a block, where YAML allows it."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    if _BREAKS & set(text):  # PyYAML would write them as they are, and read them back as spaces
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Readable.add_representer(str, _text)


def _fitting(config_text: str) -> str:
    size = len(config_text.encode())
    if size > LARGEST_CONFIG:
        raise UserError(
            f"--config: expected at most {LARGEST_CONFIG:,} bytes to send along with a job, got {size:,}; "
            "put it into the chart's values (jobs)"
        )
    if "\0" in config_text:
        raise UserError("--config: expected text, got a null byte")
    return config_text
