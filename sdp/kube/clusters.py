"""The RayClusters of a namespace, and their job configurations."""

from sdp.errors import UserError
from sdp.kube import Object
from sdp.kube.api import Api
from sdp.kube.rayjob import DEFAULT_CLUSTER

JOBS_VOLUME = "jobs"
"""The chart's name for the volume with the jobs' configurations."""


def find_cluster(api: Api, name: str | None) -> Object:
    """Return the RayCluster of this name; without a name, `sdp` or the only one that no RayJob made for itself."""
    clusters = {
        cluster["metadata"]["name"]: cluster
        for cluster in api.list(api.path("rayclusters"))
        if name or "RayJob" not in {owner["kind"] for owner in cluster["metadata"].get("ownerReferences") or ()}
    }
    wanted = name or (next(iter(clusters)) if len(clusters) == 1 else DEFAULT_CLUSTER)
    if wanted in clusters:
        return clusters[wanted]
    remedy = f"there are {', '.join(sorted(clusters))}" if clusters else "helm install sdp charts/sdp-cluster"
    raise UserError(
        f"--cluster: there is no RayCluster {wanted!r} in namespace {api.namespace!r}; {remedy}, "
        "or use another --namespace"
    )


def jobs_map(raycluster: Object) -> str:
    """Return the ConfigMap that the chart mounts at /etc/sdp/jobs; empty if there is none."""
    volumes = raycluster["spec"]["headGroupSpec"]["template"]["spec"].get("volumes") or ()
    return next((str(volume["configMap"]["name"]) for volume in volumes if volume["name"] == JOBS_VOLUME), "")


def job_texts(api: Api, raycluster: Object) -> dict[str, str]:
    """Return a cluster's job configurations, by file name without .yaml."""
    name = jobs_map(raycluster)
    return yaml_entries(api.get(api.path("configmaps", name, "/api/v1"))) if name else {}


def yaml_entries(config_map: Object) -> dict[str, str]:
    """Return a ConfigMap's YAML files, by name without .yaml."""
    data = config_map.get("data") or {}
    return {key.removesuffix(".yaml"): text for key, text in data.items() if key.endswith(".yaml")}
