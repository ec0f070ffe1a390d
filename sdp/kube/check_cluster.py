"""Checks of a cluster: KubeRay's CRDs and operator, the RayCluster's pods, and the GPUs of its groups.

What Kubernetes reports by itself within a minute of installing (a missing secret, a taint, a quota) is repeated from
its reports and not predicted.
"""

import json
from collections.abc import Collection, Generator, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from sdp.console import counted
from sdp.hardware import gpus_by_accelerator
from sdp.kube import Finding, Object
from sdp.kube.api import OPERATOR_HINT, Api, Forbidden, Missing
from sdp.kube.clusters import accelerator_of, find_cluster, gpus_in, gpus_of_pod, is_own
from sdp.kube.reasons import Reasons, pods_of, stuck_pods
from sdp.kube.state import ClusterState, cluster_state
from sdp.ray.cluster import ACCELERATOR_LABEL

PRODUCT = "nvidia.com/gpu.product"
SHARED = "-SHARED"
"""The device plugin's suffix for the product of a time-shared GPU."""
OLDEST_OPERATOR = (1, 7)
FIELDS = ("authOptions", "upgradeStrategy", "autoscalerOptions", "idleTimeoutSeconds", "priority")
"""Fields of a RayCluster that the chart uses and that older CRDs silently drop."""


def resources(api: Api) -> Generator[Finding, None, None]:
    """Check that KubeRay's CRDs have the fields that the chart uses."""
    crd = json.dumps(api.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io"))
    if missing := [name for name in FIELDS if f'"{name}": ' not in crd]:
        remedy = "apply those of KubeRay 1.7 or later server-side (helm upgrade of the operator does not update CRDs)"
        yield Finding("CRDs", "failed", f"older than the chart: no {', '.join(missing)}", remedy)
    else:
        yield Finding("CRDs", "ok", "ray.io/v1 has every field that the chart uses")


def operator(api: Api) -> Generator[Finding, None, None]:
    """Check that KubeRay's operator runs and is new enough."""
    selector = "app.kubernetes.io/name in (kuberay-operator,kuberay)"
    operators = api.list("/apis/apps/v1/deployments", labelSelector=selector)
    for deployment in operators:
        metadata, container = deployment["metadata"], deployment["spec"]["template"]["spec"]["containers"][0]
        name = f"{metadata['namespace']}/{metadata['name']}"
        version = version_of(metadata, container)
        dotted = ".".join(map(str, version or ())) or "unknown"
        if not (deployment.get("status") or {}).get("availableReplicas"):
            remedy = f"kubectl -n {metadata['namespace']} describe pods"
            yield Finding("operator", "failed", f"{name} is not running", remedy)
        elif version and version[:2] < OLDEST_OPERATOR:
            yield Finding("operator", "failed", f"{name} is {dotted}", "upgrade it and its CRDs to 1.7 or later")
        else:
            yield Finding("operator", "ok" if version else "warning", f"{name} runs, version {dotted}")
    if not operators:
        none = "no deployment of KubeRay's operator"
        if any((cluster.get("status") or {}).get("state") for cluster in api.list(api.path("rayclusters"))):
            yield Finding("operator", "warning", f"{none}, but one has answered: it runs elsewhere, or was removed")
        else:
            yield Finding("operator", "failed", none, OPERATOR_HINT)


def version_of(metadata: Object, container: Object) -> tuple[int, ...] | None:
    """Return the operator's version, from its image's tag, else from the chart's label."""
    tag = container.get("image", "").partition("@")[0].rpartition(":")[2]
    for text in (tag, (metadata.get("labels") or {}).get("app.kubernetes.io/version", "")):
        parts = text.removeprefix("v").partition("-")[0].split(".")
        if len(parts) >= 2 and all(part.isdigit() for part in parts):
            return tuple(map(int, parts))
    return None


def cluster(api: Api, name: str | None) -> Generator[Finding, None, Object]:
    """Check that the cluster exists and is ready; return it."""
    raycluster = find_cluster(api, name)
    reasons = Reasons(api)
    for item in (raycluster, *(each for each in api.list(api.path("rayclusters")) if is_own(each))):
        state = cluster_state(item)
        pods = pods_of(api, state.name)
        stuck, reason = list(stuck_pods(pods)), reasons.of(item, state, pods)
        if item is raycluster or reason:
            yield judge_state(replace(state, message="" if stuck else reason), stuck)
            yield from stuck
    return raycluster


def judge_state(state: ClusterState, pods: "list[Finding]") -> Finding:
    """Judge a cluster's state: one that is starting is no failure unless something holds it up."""
    words = f"{state.name} is {state.state}"
    if state.state == "ready":
        words += f": {state.workers} of {counted(state.wanted, 'worker')}"
        if not state.message:
            return Finding("cluster", "ok", words)
    if state.message:
        words += f": {state.message}"
    hopeless = state.state not in ("starting", "ready") or state.refused or any(pod.state == "failed" for pod in pods)
    return Finding("cluster", "failed" if hopeless else "warning", words, f"kubectl describe raycluster {state.name}")


def accounts(api: Api, raycluster: Object, made: Collection[str] = ()) -> Generator[Finding, None, None]:
    """Check that the service accounts and secrets of all pods exist, or are `made` together with the cluster."""
    spec, complete = raycluster["spec"], True
    pods = [part["template"]["spec"] for part in (spec["headGroupSpec"], *(spec.get("workerGroupSpecs") or ()))]
    names = {pod.get("serviceAccountName", "default") for pod in pods} - {"default"}
    secrets = {str((spec.get("authOptions") or {}).get("secretName", "")), *_secrets_of(pods)} - {""}
    for kind, remedy, wanted in (
        ("service account", "create it, or set serviceAccount.create", names),
        ("secret", "create it, or correct the values that name it", secrets),
    ):
        resource = kind.replace(" ", "")
        for name in sorted(name for name in wanted if f"{resource}/{name}" not in made):
            try:
                api.get(api.path(f"{resource}s", name, "/api/v1"))
            except Missing:
                complete = False
                yield Finding("accounts", "failed", f"there is no {kind} {name} in {api.namespace}", remedy)
            except Forbidden:
                complete = False
                yield Finding("accounts", "warning", f"{kind} {name} may not be read from here")
    if complete:
        yield Finding("accounts", "ok", "the pods' service accounts and secrets exist")


def _secrets_of(part: Any) -> Iterator[str]:
    """Yield the secrets without which no pod of these starts."""
    if isinstance(part, list):
        for item in part:
            yield from _secrets_of(item)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in ("secretKeyRef", "secretRef", "secret"):
                if not value.get("optional"):
                    yield value.get("name") or value["secretName"]
            elif key == "imagePullSecrets":
                yield from (secret["name"] for secret in value)
            else:
                yield from _secrets_of(value)


def groups(api: Api, raycluster: Object) -> Generator[Finding, None, None]:
    """Check that there are nodes with room for each group's pods, and with GPUs of the kind that its label names."""
    nodes = api.list("/api/v1/nodes")
    if large := _too_large(_head(raycluster["spec"]), nodes):
        yield large
    for group in raycluster["spec"].get("workerGroupSpecs") or ():
        if not group.get("maxReplicas", 1):
            continue
        if gpus_of_pod(group["template"]["spec"]):
            yield judge_group(group, nodes)
        elif large := _too_large(group, nodes):
            yield large


def _head(spec: Object) -> Object:
    """Return a cluster's head as a group of one pod, with the autoscaler's container, which the operator adds."""
    containers = [*spec["headGroupSpec"]["template"]["spec"]["containers"]]
    if spec.get("enableInTreeAutoscaling"):
        own = (spec.get("autoscalerOptions") or {}).get("resources")
        containers.append({"resources": own or {"requests": {"cpu": "500m", "memory": "512Mi"}}})
    return {"groupName": "head", "template": {"spec": {"containers": containers}}}


def judge_group(group: Object, nodes: list[Object]) -> Finding:
    """Judge the nodes that a GPU group's selector chooses."""
    name, label, pod = group["groupName"], accelerator_of(group), group["template"]["spec"]
    check, selector, count = f"group {name}", (pod.get("nodeSelector") or {}).items(), gpus_of_pod(pod)
    known = {product.replace(" ", "-") for gpu in gpus_by_accelerator(label) for product in gpu.products}
    selected = [
        node
        for node in nodes
        if selector <= (node["metadata"].get("labels") or {}).items()
        and gpus_in((node.get("status") or {}).get("allocatable") or {}) >= count
    ]
    products = {(node["metadata"].get("labels") or {}).get(PRODUCT, "").removesuffix(SHARED) for node in selected}
    if not label:
        detail = f"has GPUs but no label {ACCELERATOR_LABEL}, so jobs cannot select them"
        return Finding(check, "failed", detail, f"set groups.{name}.accelerator")
    if not selected:
        where = "".join(f" and {key}={value}" for key, value in selector)
        detail = f"no node has {counted(count, 'GPU')}{where} now"
        return Finding(check, "warning", detail, "an autoscaler must add one")
    if known and (wrong := sorted(products - known - {""})):
        detail = f"is labelled {label} ({' or '.join(sorted(known))}), but its pods run on {', '.join(wrong)}"
        return Finding(check, "failed", detail, f"set {PRODUCT} in groups.{name}.podSpec.nodeSelector")
    return _too_large(group, selected) or Finding(check, "ok", f"{counted(len(selected), 'node')} with {label}")


def _too_large(group: Object, nodes: list[Object]) -> Finding | None:
    """Return that none of these nodes, were it empty, has the CPUs and the memory of a group's pod."""
    asked, name = _asked_for(group["template"]["spec"]), group["groupName"]
    for node in nodes:
        has = (node.get("status") or {}).get("allocatable") or {}
        if all(parse_quantity(has[resource]) >= amount for resource, amount in asked.items() if resource in has):
            return None
    size = f"{asked['cpu'].normalize():f} CPUs and {asked['memory'] / 2**30:.0f} GiB"
    where = name if name == "head" else f"groups.{name}"
    remedy = f"an autoscaler must add a larger one, or lower {where}.cpu and memory"
    return Finding(f"group {name}", "warning", f"no node has the {size} that a pod asks for", remedy)


def _asked_for(pod: Object) -> dict[str, Decimal]:
    """Return the CPUs and bytes that a pod's containers ask for."""
    resources = [container.get("resources") or {} for container in pod["containers"]]
    asked = [(each.get("limits") or {}) | (each.get("requests") or {}) for each in resources]
    return {
        name: sum((parse_quantity(one[name]) for one in asked if name in one), Decimal()) for name in ("cpu", "memory")
    }
