"""The RayClusters of a namespace: their pods, job configurations and tokens."""

from sdp.cluster import ACCELERATOR_LABEL
from sdp.errors import UserError
from sdp.kube import Object
from sdp.kube.api import Api, Missing
from sdp.kube.rayjob import DEFAULT_CLUSTER, JOBS_FOLDER

GPU = "nvidia.com/gpu"


def find_cluster(api: Api, name: str | None) -> Object:
    """Return the RayCluster of this name; without a name, `sdp` or the only one."""
    if name is not None:
        try:
            cluster: Object = api.get(api.path("rayclusters", name))
        except Missing as error:
            raise UserError(f"--cluster: {_not_found(standing_clusters(api), api, repr(name))}") from error
        return cluster
    clusters = standing_clusters(api)
    default = [cluster for cluster in clusters if cluster["metadata"]["name"] == DEFAULT_CLUSTER]
    if len(default or clusters) == 1:
        return (default or clusters)[0]
    if clusters:
        raise UserError(f"--cluster: expected one of the clusters of namespace {api.namespace!r}: {_names(clusters)}")
    raise UserError(f"--cluster: {_not_found(clusters, api)}")


def standing_clusters(api: Api) -> list[Object]:
    """Return the clusters that no RayJob created for itself."""
    return [
        cluster
        for cluster in api.list(api.path("rayclusters"))
        if "RayJob" not in {owner["kind"] for owner in cluster["metadata"].get("ownerReferences") or ()}
    ]


def _names(clusters: list[Object]) -> str:
    return ", ".join(sorted(cluster["metadata"]["name"] for cluster in clusters))


def _not_found(clusters: list[Object], api: Api, name: str = "") -> str:
    remedy = "helm install sdp charts/sdp-cluster, or use another --namespace"
    have = f"there are {_names(clusters)}" if clusters else remedy
    return f"there is no RayCluster{f' {name}' if name else ''} in namespace {api.namespace!r}; {have}"


def accelerator_of(group: Object) -> str:
    """Return the accelerator label by which jobs select a worker group; empty if it has none."""
    return str((group.get("labels") or {}).get(ACCELERATOR_LABEL, ""))


def gpus_of_pod(pod: Object) -> int:
    """Return the GPUs that a pod's containers ask for."""
    limits = [(container.get("resources") or {}).get("limits") or {} for container in pod.get("containers") or ()]
    return sum(int(limit.get(GPU, 0)) for limit in limits)


def pods_wanted(group: Object) -> tuple[int, int]:
    """Return the fewest and the most pods of a worker group."""
    hosts = int(group.get("numOfHosts") or 1)
    fewest = max(int(group.get("minReplicas") or 0), int(group.get("replicas") or 0))
    most = int(group.get("maxReplicas") or fewest)
    return fewest * hosts, max(fewest, most) * hosts


def jobs_map(raycluster: Object) -> str | None:
    """Return the ConfigMap that the head mounts at /etc/sdp/jobs; None if there is none."""
    pod = raycluster["spec"]["headGroupSpec"]["template"]["spec"]
    mounts = {
        mount["name"]
        for container in pod["containers"]
        for mount in container.get("volumeMounts") or ()
        if mount["mountPath"].rstrip("/") == JOBS_FOLDER
    }
    for volume in pod.get("volumes") or ():
        if volume["name"] in mounts and "configMap" in volume:
            return str(volume["configMap"]["name"])
    return None


def job_texts(api: Api, raycluster: Object) -> dict[str, str]:
    """Return a cluster's job configurations, by file name without .yaml."""
    name = jobs_map(raycluster)
    return yaml_entries(api.get(api.path("configmaps", name, "/api/v1"))) if name else {}


def yaml_entries(config_map: Object) -> dict[str, str]:
    """Return a ConfigMap's YAML files, by name without .yaml."""
    data = config_map.get("data") or {}
    return {key.removesuffix(".yaml"): text for key, text in data.items() if key.endswith(".yaml")}


def token_secret(raycluster: Object) -> str | None:
    """Return the secret of a cluster's token; None if it requires none."""
    auth = raycluster["spec"].get("authOptions")
    if not auth or auth.get("mode", "token") == "disabled":
        return None
    return str(auth.get("secretName") or raycluster["metadata"]["name"])
