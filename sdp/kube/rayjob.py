"""The RayJob of a job: the object in manifests/JOB.yaml, built from the command line.

`sdp submit JOB --config FILE` sends the configuration in an environment variable, since running pods get no new files.
"""

import re
import secrets
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import yaml

from sdp.console import SUBMITTED_ENV, nearest
from sdp.errors import UserError
from sdp.kube import Object

if TYPE_CHECKING:
    from sdp.kube.submit import Submission

CONFIG_ENV = "SDP_JOB_CONFIG"
JOBS_FOLDER = "/etc/sdp/jobs"
"""The folder of the jobs' configurations in the pods of the chart's cluster."""
LOGS_FOLDER = "_logs"
"""The folder of a job's output with what its logs said last, by submission."""
STOP_WAIT_ENV = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_WAIT_S = 300
"""Seconds between SIGTERM and SIGKILL, enough for a last checkpoint; Ray's default is three."""
DEFAULT_CLUSTER = "sdp"
START_S = 3600
"""Seconds until a job fails whose cluster is not ready."""
LARGEST_CONFIG = 100_000
"""Bytes. Linux allows 131,072 in one environment variable."""
LONGEST_NAME = 47
"""KubeRay's limit for a RayJob's name."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of Kubernetes' generated name suffixes, which cannot form words."""


def kind_of(job: str) -> str:
    """Return the kind of a job, which may have several named configurations: `train` for train-online."""
    return job.partition("-")[0]


def make_rayjob(submission: "Submission", config_text: str | None = None, cluster: str = DEFAULT_CLUSTER) -> Object:
    """Return the RayJob that runs a submission's job under the supervisor on an existing cluster, which is `cluster`.

    Without `config_text` the job uses the cluster's configuration in /etc/sdp/jobs. A training on a cluster of its own
    waits for no more GPUs than that has. Without a name in the submission, the RayJob's is made of the job's and five
    characters, here rather than by Kubernetes, so that a repeated request does not create a second one.
    """
    job, name = submission.job, submission.name
    sets = [word for override in submission.overrides for word in ("--set", override)]
    env = {STOP_WAIT_ENV: str(STOP_WAIT_S)}
    config = ["--config", f"{JOBS_FOLDER}/{job}.yaml"]
    if config_text is not None:
        if (size := len(config_text.encode())) > LARGEST_CONFIG:
            raise UserError(
                f"--config: expected at most {LARGEST_CONFIG:,} bytes to send with a job, got {size:,}; "
                "put it in the chart's values (jobs)"
            )
        config = ["--config", f"env:{CONFIG_ENV}"]
        env[CONFIG_ENV] = config_text
    if config_text is not None or submission.own_cluster:
        file = ["--config", submission.config] if submission.config else []
        own_cluster = ["--own-cluster"] if submission.own_cluster else []
        env[SUBMITTED_ENV] = shlex.join(["sdp", "submit", job, *file, *own_cluster, *sets])
    if submission.own_cluster and kind_of(job) == "train":
        sets += ["--set", "scaling.can_grow=false"]
    if name is None:
        name = f"sdp-{job}-{''.join(secrets.choice(_SUFFIX) for _ in range(5))}"
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise UserError(
            f"--name: expected at most {LONGEST_NAME} lower-case letters, digits and hyphens, a letter first, "
            f"got {name!r}"
        )
    words = [kind_of(job), *config, *sets, *(["--only-failed"] if submission.only_failed else ())]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "sdp", "sdp/job": job}},
        "spec": {
            "submissionMode": "HTTPMode",
            "clusterSelector": {"ray.io/cluster": cluster},
            "preRunningDeadlineSeconds": START_S,
            "entrypoint": shlex.join(["python", "-m", "sdp.supervisor", *words]),
            "runtimeEnvYAML": as_yaml({"env_vars": env}),
        },
    }


def config_in(words: Sequence[str], text: str | None = None) -> Any:
    """Return the configuration that a command line JOB --config FILE --set KEY=VALUE … names; `text` is the file's."""
    from sdp.config import load

    at = words.index("--config")
    sets = [value for word, value in pairwise(words) if word == "--set"]
    return load(words[at - 1], words[at + 1], sets, text=text)


def checked_job(job: str, kinds: Sequence[str]) -> str:
    """Return a valid job name: KIND, or KIND-NAME."""
    kind, hyphen, name = job.partition("-")
    if kind not in kinds:
        near = nearest(kind, kinds)
        hint = f"did you mean {near}{hyphen}{name}?" if near else "see sdp submit --help"
        raise UserError(f"submit: JOB: expected {', '.join(kinds)}, or one of these and -NAME, got {job!r}; {hint}")
    if not _NAME.fullmatch(job):
        raise UserError(f"submit: JOB: expected lower-case letters, digits and hyphens after {kind}-, got {job!r}")
    return job


def as_yaml(data: Any) -> str:
    """Return YAML with keys in order."""
    return str(yaml.safe_dump(data, sort_keys=False, width=10**6))
