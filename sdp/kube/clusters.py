"""The RayClusters of a namespace, and their job configurations."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sdp.errors import UserError, one_line
from sdp.kube import Object
from sdp.kube.api import Api
from sdp.kube.rayjob import CONFIG_ENV, DEFAULT_CLUSTER, config_in
from sdp.ray.cluster import ACCELERATOR_LABEL

Release = tuple[Object, dict[str, str]]
"""A RayCluster and its job configurations."""
JOBS_VOLUME = "jobs"
"""The chart's name for the volume with the jobs' configurations."""


def find_cluster(api: Api, name: str | None) -> Object:
    """Return the RayCluster of this name; without a name, `sdp` or the only one that no RayJob made for itself."""
    clusters = {
        cluster["metadata"]["name"]: cluster
        for cluster in api.list(api.path("rayclusters"))
        if name or not is_own(cluster)
    }
    wanted = name or (next(iter(clusters)) if len(clusters) == 1 else DEFAULT_CLUSTER)
    if wanted in clusters:
        return clusters[wanted]
    remedy = f"there are {', '.join(sorted(clusters))}" if clusters else "helm install sdp charts/sdp-cluster"
    raise UserError(
        f"--cluster: there is no RayCluster {wanted!r} in namespace {api.namespace!r}; {remedy}, "
        "or use another --namespace"
    )


def is_own(raycluster: Object) -> bool:
    """Return whether a RayJob has made a cluster for itself."""
    return "RayJob" in {owner["kind"] for owner in raycluster["metadata"].get("ownerReferences") or ()}


def jobs_map(raycluster: Object) -> str:
    """Return the ConfigMap that the chart mounts at /etc/sdp/jobs; empty if there is none."""
    volumes = raycluster["spec"]["headGroupSpec"]["template"]["spec"].get("volumes") or ()
    return next((str(volume["configMap"]["name"]) for volume in volumes if volume["name"] == JOBS_VOLUME), "")


def job_texts(api: Api, raycluster: Object) -> dict[str, str]:
    """Return a cluster's job configurations, by file name without .yaml."""
    name = jobs_map(raycluster)
    return yaml_entries(api.get(api.path("configmaps", name, "/api/v1"))) if name else {}


def config_of(api: Api, rayjob: Object) -> Any:
    """Return the configuration of a RayJob's job; UserError says that the RayJob is not one of sdp's."""
    spec = rayjob["spec"]
    try:
        words = shlex.split(spec["entrypoint"])
        text = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"].get(CONFIG_ENV)
        if text is None:
            own = {"spec": spec["rayClusterSpec"]} if "rayClusterSpec" in spec else None
            texts = job_texts(api, own or find_cluster(api, spec["clusterSelector"]["ray.io/cluster"]))
            text = texts.get(Path(words[words.index("--config") + 1]).stem, "")
        return config_in(words, text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        cause = f"{type(error).__name__}: {one_line(error, 100)}"
        raise UserError(
            f"RayJob {rayjob['metadata']['name']}: its command and runtimeEnvYAML are not a job's of sdp ({cause})"
        ) from error


def read_manifests(file: str) -> list[Object]:
    """Read a file that `helm template` wrote; `-` is standard input."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        objects = [document for document in yaml.safe_load_all(text) if document]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--manifest: {file}: expected a file of YAML ({one_line(error)})") from error
    if not all(isinstance(document, dict) and "kind" in document for document in objects):
        raise UserError(f"--manifest: {file}: expected Kubernetes objects; helm template writes them")
    return objects


def release_in(objects: Sequence[Object], name: str | None) -> Release:
    """Return the RayCluster of this name, or of any, among the objects that helm has rendered."""
    named = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    for (kind, own), cluster in named.items():
        if kind == "RayCluster" and name in (None, own):
            return cluster, yaml_entries(named.get(("ConfigMap", jobs_map(cluster)), {}))
    raise UserError("--manifest: expected a RayCluster in it, got none; if helm template failed, mend what it says")


def made_in(objects: Sequence[Object]) -> set[str]:
    """Return the objects that helm has rendered, each as kubectl names it."""
    return {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in objects}


def accelerator_of(group: Object) -> str:
    """Return the accelerator label by which jobs select a worker group; empty if it has none."""
    return str((group.get("labels") or {}).get(ACCELERATOR_LABEL, ""))


def gpus_of_pod(pod: Object) -> int:
    """Return the GPUs, or slices of one, that a pod's containers ask for."""
    return sum(gpus_in((container.get("resources") or {}).get("limits") or {}) for container in pod["containers"])


def gpus_in(amounts: Mapping[str, str]) -> int:
    """Return the GPUs, or slices of one, among a pod's or a node's resources."""
    kinds = ("nvidia.com/gpu", "nvidia.com/mig-")
    return sum(int(amount) for name, amount in amounts.items() if name.startswith(kinds))


def yaml_entries(config_map: Object) -> dict[str, str]:
    """Return a ConfigMap's YAML files, by name without .yaml."""
    data = config_map.get("data") or {}
    return {key.removesuffix(".yaml"): text for key, text in data.items() if key.endswith(".yaml")}
