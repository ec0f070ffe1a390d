"""Checks of a cluster: API server, KubeRay's CRDs and operator, the RayCluster's pods, and the GPUs of its groups.

What Kubernetes reports by itself within a minute of installing (a missing secret, a taint, a quota) is repeated from
its reports and not predicted.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime

from sdp.cluster import ACCELERATOR_LABEL
from sdp.console import counted
from sdp.errors import UserError, one_line
from sdp.hardware import gpus_by_accelerator
from sdp.kube import Object
from sdp.kube.api import OPERATOR_HINT, Forbidden
from sdp.kube.clusters import GPU, accelerator_of, gpus_of_pod, pods_wanted
from sdp.kube.site import Finding, Site, failed, ok, warning
from sdp.kube.state import ClusterState, cluster_state

PRODUCT = "nvidia.com/gpu.product"
SHARED = "-SHARED"
"""The device plugin's suffix for the product of a time-shared GPU."""
OLDEST_OPERATOR = (1, 7)
STARTING_S = 1800.0
"""Time that a new node and a large image may take; pods that start later wait for something else."""

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "rayclusters": {
        "spec": ("authOptions", "upgradeStrategy", "autoscalerOptions"),
        "spec.authOptions": ("mode", "secretName"),
        "spec.autoscalerOptions": ("version",),
        "spec.workerGroupSpecs": ("labels", "priority", "idleTimeoutSeconds"),
    },
    "rayjobs": {"spec": ("submissionMode", "clusterSelector", "runtimeEnvYAML", "entrypoint")},
}
"""Fields of ray.io/v1 that the chart and the manifests use and that older CRDs silently drop."""

_STUCK = {
    "ImagePullBackOff": "check image, tag and imagePullSecrets",
    "ErrImagePull": "check image, tag and imagePullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
    "CrashLoopBackOff": "kubectl logs --previous shows the reason",
    "CreateContainerConfigError": "an object that it refers to is missing",
}


def server(site: Site) -> Iterator[Finding]:
    """Check that the API server answers."""
    with site.api.explained("GET", "/version"):
        response = site.api.response("GET", "/version")
        version = dict(json.loads(response.data)).get("gitVersion", "of unknown version")
    where = f"context {site.api.context}" if site.api.context else "this pod's cluster"
    yield ok("server", f"Kubernetes {version} answers ({where}, namespace {site.api.namespace})")


def resources(site: Site) -> Iterator[Finding]:
    """Check that ray.io/v1 is served, with the fields that sdp uses."""
    missing = [kind for kind in FIELDS if not site.serves("/apis/ray.io/v1", kind)]
    if missing:
        yield failed("CRDs", f"ray.io/v1 does not have {' and '.join(missing)}", OPERATOR_HINT)
        return
    lacking: list[str] = []
    for kind, wanted in FIELDS.items():
        try:
            crd = site.api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}.ray.io")
        except Forbidden:
            yield warning("CRDs", f"{kind}.ray.io exists; no right to read its fields")
            return
        lacking += [f"{kind}: {path}" for path in lacking_fields(crd, wanted)]
    if lacking:
        remedy = "apply those of KubeRay 1.7 or later server-side (helm upgrade of the operator does not update CRDs)"
        yield failed("CRDs", f"older than the chart: no {', '.join(lacking)}", remedy)
    else:
        yield ok("CRDs", "ray.io/v1 has RayCluster and RayJob with every field that the chart uses")


def lacking_fields(crd: Object, wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the fields that version v1 of a CRD lacks."""
    version: Object = next(
        (version for version in crd["spec"]["versions"] if version["name"] == "v1"), {"served": False}
    )
    if not version.get("served", True):
        return ["v1"]
    schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
    return [f"{path}.{name}" for path, names in wanted.items() for name in names if name not in _fields(schema, path)]


def _fields(schema: Object, path: str) -> Object:
    for part in path.split("."):
        schema = (schema.get("properties") or {}).get(part) or {}
        schema = schema.get("items") or schema
    return schema.get("properties") or {}


def operator(site: Site) -> Iterator[Finding]:
    """Check that KubeRay's operator runs, is new enough, and watches this namespace."""
    selector = "app.kubernetes.io/name in (kuberay-operator,kuberay)"
    operators = site.api.list("/apis/apps/v1/deployments", labelSelector=selector)
    for operator in operators:
        yield _judge_operator(operator, site.api.namespace)
    if not operators:
        yield failed("operator", "no deployment of KubeRay's operator", OPERATOR_HINT)


def _judge_operator(deployment: Object, namespace: str) -> Finding:
    metadata, container = deployment["metadata"], deployment["spec"]["template"]["spec"]["containers"][0]
    name = f"{metadata['namespace']}/{metadata['name']}"
    version = version_of(metadata, container)
    dotted = ".".join(map(str, version or ()))
    if not (deployment.get("status") or {}).get("availableReplicas"):
        return failed("operator", f"{name} is not running", f"kubectl -n {metadata['namespace']} describe pods")
    if version and version[:2] < OLDEST_OPERATOR:
        return failed("operator", f"{name} is {dotted}", "upgrade it and its CRDs to 1.7 or later")
    if not watches(container, namespace):
        return failed("operator", f"{name} does not watch namespace {namespace}", "see its --watch-namespace")
    if version is None:
        return warning("operator", f"{name} runs, of unknown version", "1.7 or later is needed")
    return ok("operator", f"{name} runs, version {dotted}")


def version_of(metadata: Object, container: Object) -> tuple[int, ...] | None:
    """Return the operator's version, from its image's tag, else from the chart's label."""
    tag = container.get("image", "").partition("@")[0].rpartition(":")[2]
    for text in (tag, (metadata.get("labels") or {}).get("app.kubernetes.io/version", "")):
        parts = text.removeprefix("v").partition("-")[0].split(".")
        if len(parts) >= 2 and all(part.isdigit() for part in parts):
            return tuple(map(int, parts))
    return None


def watches(container: Object, namespace: str) -> bool:
    """Return whether the operator's command line lets it watch a namespace."""
    words = [word for field in ("command", "args") for word in container.get(field) or ()]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, _, value = word.lstrip("-").partition("=")
        if flag == "watch-namespace":
            value = value or following
            return not value or namespace in value.split(",")
    return True


def cluster(site: Site) -> Iterator[Finding]:
    """Check that the cluster exists and is ready."""
    try:
        raycluster = site.cluster
    except Forbidden:
        raise  # the cluster may exist
    except UserError as error:
        yield failed("cluster", str(error).removeprefix("--cluster: "))
        return
    name = raycluster["metadata"]["name"]
    if site.rendered:
        yield ok("cluster", f"{name}, from the manifests")
        return
    stuck = list(_stuck_pods(site, name))
    yield judge_state(cluster_state(raycluster), stuck, datetime.now(UTC))
    yield from stuck


def judge_state(state: ClusterState, pods: "list[Finding]", now: datetime) -> Finding:
    """Judge a cluster's state: pods that are starting fail the check only after STARTING_S."""
    if state.state == "ready":
        return ok("cluster", f"{state.name} is ready: {state.workers} of {counted(state.wanted, 'worker')}")
    words = f"{state.name} is {state.state}{f': {state.message}' if state.message else ''}"
    age_s = (now - state.started).total_seconds() if state.started else 0.0
    hopeless = state.state != "starting" or state.refused or any(pod.state == "failed" for pod in pods)
    if not hopeless and age_s <= STARTING_S:
        return warning("cluster", words, "pods are starting: run sdp doctor again in a few minutes")
    age = "" if hopeless else f", for {age_s / 60:.0f} minutes"
    return failed("cluster", f"{words}{age}", f"kubectl describe raycluster {state.name}")


def _stuck_pods(site: Site, name: str) -> Iterator[Finding]:
    for pod in site.api.list(site.api.path("pods", group="/api/v1"), labelSelector=f"ray.io/cluster={name}"):
        status, pod_name = pod.get("status") or {}, pod["metadata"]["name"]
        for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if (reason := waiting.get("reason")) in _STUCK:
                words = one_line(waiting.get("message") or "", 200)
                yield failed("pods", f"{pod_name}: {reason}{f' ({words})' if words else ''}", _STUCK[reason])
        for condition in status.get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                words = one_line(condition.get("message") or "")
                yield warning("pods", f"{pod_name} is not scheduled: {words}", "kubectl describe pod shows more")


def groups(site: Site) -> Iterator[Finding]:
    """Check that there are nodes with the GPUs that each group asks for, of the kind that its label names."""
    for group in (site.cluster_or_none or {"spec": {}})["spec"].get("workerGroupSpecs") or ():
        if gpus_of_pod(group["template"]["spec"]) and pods_wanted(group)[1]:
            yield from judge_group(group, site.nodes, site.autoscalers)


def judge_group(group: Object, nodes: list[Object], autoscalers: list[str]) -> Iterator[Finding]:
    """Judge the nodes that a GPU group's selector chooses."""
    name, label, pod = group["groupName"], accelerator_of(group), group["template"]["spec"]
    check, selector, count = f"group {name}", (pod.get("nodeSelector") or {}).items(), gpus_of_pod(pod)
    known = {product.replace(" ", "-") for gpu in gpus_by_accelerator(label) for product in gpu.products}
    selected = [
        node
        for node in nodes
        if selector <= (node["metadata"].get("labels") or {}).items()
        and int(((node.get("status") or {}).get("allocatable") or {}).get(GPU, 0)) >= count
    ]
    products = {(node["metadata"].get("labels") or {}).get(PRODUCT, "") for node in selected} - {""}
    wrong = sorted({product.removesuffix(SHARED) for product in products} - known)
    if not label:
        remedy = f"set groups.{name}.accelerator"
        yield failed(check, f"has GPUs but no label {ACCELERATOR_LABEL}, so jobs cannot select them", remedy)
    elif not selected:
        where = " and ".join(f"{key}={value}" for key, value in selector)
        detail = f"no node has {counted(count, 'GPU')}{f' and {where}' if where else ''}"
        if autoscalers:
            yield warning(check, f"{detail} now", f"{' and '.join(autoscalers)} must be able to add one")
        else:
            yield failed(check, detail, f"change groups.{name} or the nodes")
    elif not known:
        yield warning(check, f"accelerator {label} is not in the catalogue: its cost and MFU will be missing")
    elif wrong:
        detail = f"is labelled {label} ({' or '.join(sorted(known))}), but its pods run on {', '.join(wrong)}"
        yield failed(check, detail, f"set groups.{name}.nodeSelector to {PRODUCT}")
    elif any(product.endswith(SHARED) for product in products):
        yield warning(check, "its GPUs are time-shared", "use whole GPUs for training")
    else:
        yield ok(check, f"{counted(len(selected), 'node')} with {label}")
