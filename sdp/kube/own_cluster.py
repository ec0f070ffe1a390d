"""A cluster for one job: pods like those of the chart's RayCluster, in the groups and numbers that the job needs.

It has all of its pods from the start, so that a queue admits all or none, and is deleted after the job.
"""

import json
import math
from collections import Counter

from sdp.config import JobConfig, WorkersConfig
from sdp.config.download import DownloadConfig
from sdp.config.train import TrainConfig
from sdp.errors import UserError
from sdp.kube import Object
from sdp.kube.clusters import accelerator_of, gpus_of_pod

SETTINGS = "sdp/own-cluster"
"""The annotation by which the chart hands over its value ownCluster."""
RELEASE, JOB = "sdp/jobs-of", "sdp/rayjob"
"""Labels of the pods: the release, by which its network policies select them, and the RayJob."""
_OF_HELM = ("app.kubernetes.io/", "helm.sh/")
_LEFT_OUT = {"upgradeStrategy", "enableInTreeAutoscaling", "autoscalerOptions", "idleTimeoutSeconds", "priority"}
"""Fields that KubeRay refuses in a RayJob's cluster, or without its autoscaler."""
_OF_AUTOSCALER = ("token", "autoscaler-tmp", "autoscaler-home")
"""Volumes of the head."""


def with_own_cluster(rayjob: Object, release: Object, config: JobConfig) -> Object:
    """Return a job's RayJob with a cluster of its own, copied from a release's, instead of a selector."""
    name, about = rayjob["metadata"]["name"], release["metadata"]
    settings = json.loads(about.get("annotations", {}).get(SETTINGS, "{}"))
    further = settings.pop("labels", None) or {}
    labels = {key: value for key, value in about.get("labels", {}).items() if not key.startswith(_OF_HELM)} | further
    # The cluster's name is KubeRay's choice, so what selects pods by it selects them by their job.
    text = json.dumps(release["spec"]).replace(f'"ray.io/cluster": "{about["name"]}"', f'"{JOB}": "{name}"')
    spec = {key: value for key, value in json.loads(text).items() if key not in _LEFT_OUT}
    head, pods = spec["headGroupSpec"], _pods(config, spec["workerGroupSpecs"])
    volumes = head["template"]["spec"].get("volumes", [])
    head["template"]["spec"]["volumes"] = [volume for volume in volumes if volume["name"] not in _OF_AUTOSCALER]
    spec["workerGroupSpecs"] = groups = [
        {key: value for key, value in group.items() if key not in _LEFT_OUT}
        | dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), pods[group["groupName"]])
        for group in spec["workerGroupSpecs"]
        if pods[group["groupName"]]
    ]
    for template in (head["template"], *(group["template"] for group in groups)):
        template.setdefault("metadata", {}).setdefault("labels", {}).update({RELEASE: about["name"], JOB: name})
    job = {key: rayjob["spec"][key] for key in ("submissionMode", "entrypoint", "runtimeEnvYAML")}
    own = {"shutdownAfterJobFinishes": True, "rayClusterSpec": spec}
    metadata = {"name": name, "labels": labels | rayjob["metadata"]["labels"]}
    return rayjob | {"metadata": metadata, "spec": job | settings | own}


def workers_of(config: JobConfig) -> list[WorkersConfig]:
    """Return the sections that say which workers a job has; only an online training has encoders of its own."""
    alone = isinstance(config, TrainConfig) and config.data.mode != "online"
    names = ("scaling",) if alone else ("scaling", "encode")
    return [getattr(config, name) for name in names if hasattr(config, name)]


def _pods(config: JobConfig, groups: list[Object]) -> Counter[str]:
    """Return the number of pods by group: those with the job's GPUs, and all of the others if it works on CPUs."""
    least, most, pods = Counter[str](), Counter[str](), Counter[str]()
    for workers in workers_of(config):
        least[str(workers.accelerator)] += workers.least
        most[str(workers.accelerator)] += workers.most
    for accelerator, missing in most.items():
        for group in sorted(groups, key=lambda group: -int(group.get("priority", 0))):
            gpus = gpus_of_pod(group["template"]["spec"])
            if missing > 0 and gpus and accelerator in (accelerator_of(group), "gpu"):
                pods[group["groupName"]] = min(math.ceil(missing / gpus), group["maxReplicas"])
                missing -= pods[group["groupName"]] * gpus
        if accelerator not in ("cpu", "None") and (offered := most[accelerator] - missing) < least[accelerator]:
            raise UserError(
                f"--own-cluster: the job needs {least[accelerator]} {accelerator} GPUs to start, and the groups grow "
                f"to {offered}; add a group, raise maxReplicas, or change accelerator and num_workers"
            )
    transform = getattr(config, "transform", None)
    if "cpu" in most or isinstance(config, DownloadConfig) or (transform and transform.node_labels):
        pods.update({group["groupName"]: group["maxReplicas"] for group in groups if not accelerator_of(group)})
    if not pods.total():
        raise UserError("--own-cluster: the job names no workers that a group has; set scaling.accelerator")
    return pods
