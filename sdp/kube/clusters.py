"""The RayClusters of a namespace: the one that is meant, and what its pods are given."""

from collections.abc import Iterator
from typing import Any

from sdp.errors import UserError
from sdp.kube.answers import Missing
from sdp.kube.api import Api, Object
from sdp.kube.rayjob import JOBS_FOLDER, USUAL_CLUSTER

MADE_BY_A_JOB = "RayJob"


def find_cluster(api: Api, name: str | None) -> Object:
    """The RayCluster of this name; without one, `sdp`, or the only one there is."""
    if name is not None:
        try:
            found: Object = api.get(api.mine("rayclusters", name))
        except Missing as error:
            raise UserError(f"--cluster: {_none(api, name)}") from error
        return found
    there = standing(api)
    usual = [each for each in there if each["metadata"]["name"] == USUAL_CLUSTER]
    if len(usual or there) == 1:
        return (usual or there)[0]
    if there:
        names = ", ".join(sorted(each["metadata"]["name"] for each in there))
        raise UserError(f"--cluster: expected one of the clusters of namespace {api.namespace!r}: {names}")
    raise UserError(f"--cluster: {_none(api, None)}")


def standing(api: Api) -> list[Object]:
    """The clusters that were made to stay, and not by a RayJob for itself."""
    found = api.list(api.mine("rayclusters"))
    return [each for each in found if MADE_BY_A_JOB not in {owner["kind"] for owner in _owners(each)}]


def _owners(item: Object) -> list[dict[str, str]]:
    return item["metadata"].get("ownerReferences") or []


def _none(api: Api, name: str | None) -> str:
    names = sorted(each["metadata"]["name"] for each in standing(api))
    what = f"there is no RayCluster {name!r}" if name else "there is no RayCluster"
    have = (
        f"; there are {', '.join(names)}"
        if names
        else "; helm install sdp charts/sdp-cluster, or take another --namespace"
    )
    return f"{what} in namespace {api.namespace!r}{have}"


def templates(raycluster: Object) -> Iterator[tuple[str, Object]]:
    """The pod specs of a cluster by group, the head's first, with what the operator adds to it."""
    spec = raycluster["spec"]
    head = dict(spec["headGroupSpec"]["template"]["spec"])
    if spec.get("enableInTreeAutoscaling"):
        # The operator's own defaults where the cluster does not say.
        asked = (spec.get("autoscalerOptions") or {}).get("resources") or {
            "requests": {"cpu": "500m", "memory": "512Mi"},
        }
        head["containers"] = [*head["containers"], {"name": "autoscaler", "resources": asked}]
    yield "head", head
    for group in spec.get("workerGroupSpecs") or ():
        yield group["groupName"], group["template"]["spec"]


def jobs_map(raycluster: Object) -> str | None:
    """The ConfigMap that the head has at /etc/sdp/jobs; None where nothing is there."""
    pod = raycluster["spec"]["headGroupSpec"]["template"]["spec"]
    mounts = {
        mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts") or () if _is_jobs(mount)
    }
    for volume in pod.get("volumes") or ():
        if volume["name"] in mounts and "configMap" in volume:
            return str(volume["configMap"]["name"])
    return None


def _is_jobs(mount: dict[str, Any]) -> bool:
    return str(mount["mountPath"]).rstrip("/") == JOBS_FOLDER


def job_texts(api: Api, raycluster: Object) -> dict[str, str]:
    """The configurations that a cluster holds, by file name without .yaml."""
    name = jobs_map(raycluster)
    if name is None:
        return {}
    data = api.get(api.mine("configmaps", name, "/api/v1")).get("data") or {}
    return {key.removesuffix(".yaml"): text for key, text in data.items() if key.endswith(".yaml")}


def token_secret(raycluster: Object) -> str | None:
    """The secret that holds the token of a cluster; None where it asks for none."""
    auth = raycluster["spec"].get("authOptions")
    if not auth or auth.get("mode", "token") == "disabled":
        return None
    return str(auth.get("secretName") or raycluster["metadata"]["name"])
