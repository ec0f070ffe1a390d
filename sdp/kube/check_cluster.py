"""Checks of one RayCluster: readiness, nodes that fit its pods, GPU drivers, and objects that its pods refer to."""

from collections.abc import Iterator
from datetime import UTC, datetime

from sdp.cluster import ACCELERATOR_LABEL
from sdp.console import counted
from sdp.errors import UserError, one_line
from sdp.hardware import CUDA_MAJOR, DRIVERS, gpus_by_accelerator
from sdp.kube import Object
from sdp.kube.api import Forbidden, Missing
from sdp.kube.clusters import accelerator_of, pods_wanted, templates, token_secret
from sdp.kube.dashboard import TOKEN_KEY
from sdp.kube.placing import GPU, PRODUCT, Fit, place, requests
from sdp.kube.site import Finding, Site, failed, ok, warning
from sdp.kube.state import ClusterState, cluster_state

SHARED = "-SHARED"
"""The device plugin's suffix for the product of a time-shared GPU."""

DRIVER = "nvidia.com/cuda.driver-version.major", "nvidia.com/cuda.driver.major"
"""Node labels of GPU feature discovery, the newer one first."""

STARTING_S = 1800.0
"""Time that a new node and a large image may take; pods that start later wait for something else."""

_STUCK = {
    "ImagePullBackOff": "check image, tag and imagePullSecrets",
    "ErrImagePull": "check image, tag and imagePullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
    "CrashLoopBackOff": "kubectl logs --previous shows the reason",
    "CreateContainerConfigError": "an object that it refers to is missing",
}


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
                yield warning("pods", f"{pod_name} is not scheduled: {words}", "see its group below")


def groups(site: Site) -> Iterator[Finding]:
    """Check that nodes fit each group's pods and have the GPU of the group's accelerator label."""
    specs = {group["groupName"]: group for group in site.worker_groups}
    for name, pod in templates(site.cluster_or_none):
        fit = place(pod, site.nodes)
        yield judge(name, pods_wanted(specs[name]) if name in specs else (1, 1), fit, site.autoscalers)
        nodes = [node for node in site.nodes if node["metadata"]["name"] in fit.nodes]
        yield from judge_products(name, accelerator_of(specs.get(name, {})), pod, nodes)


def judge(name: str, wanted: tuple[int, int], fit: Fit, autoscalers: "list[str]") -> Finding:
    """Judge whether a group's pods fit the nodes; `wanted` is the smallest and the largest number of pods."""
    check, (least, most), growers = f"group {name}", wanted, " and ".join(autoscalers)
    room = f"{counted(len(fit.nodes), 'node')} with room for {counted(fit.room, 'pod')}"
    if most == 0:
        return ok(check, "needs no pods")
    if fit.room >= most:
        return ok(check, f"{room}, up to {most} wanted")
    if autoscalers and fit.nodes:
        return ok(check, f"{room} of up to {most}; {growers} adds more")
    obstacles = fit.why_not() or "there are no nodes"
    if autoscalers:
        return warning(check, f"no node fits now ({obstacles})", f"{growers} must be able to add one")
    if not fit.nodes:
        return failed(check, f"no node can take its pods: {obstacles}", f"change groups.{name} or the nodes")
    if fit.room < least:
        return failed(check, f"{room}, at least {least} wanted ({obstacles})", "add nodes, or lower it")
    return warning(check, f"{room}, up to {most} wanted", "lower maxReplicas or add nodes")


def judge_products(name: str, label: str, pod: Object, nodes: "list[Object]") -> Iterator[Finding]:
    """Check that a group's nodes have the GPU that its accelerator label names."""
    check = f"group {name}"
    if not requests(pod).get(GPU):
        return
    if not label:
        remedy = f"set groups.{name}.accelerator"
        yield failed(check, f"has GPUs but no label {ACCELERATOR_LABEL}, so jobs cannot select them", remedy)
        return
    known = {product.replace(" ", "-") for gpu in gpus_by_accelerator(label) for product in gpu.products}
    products = {(node["metadata"].get("labels") or {}).get(PRODUCT, "") for node in nodes} - {""}
    shared = {product for product in products if product.endswith(SHARED)}
    wrong = sorted({product.removesuffix(SHARED) for product in products} - known)
    if not known:
        yield warning(check, f"accelerator {label} is not in the catalogue: its cost and MFU will be missing")
    elif wrong:
        detail = f"is labelled {label} ({' or '.join(sorted(known))}), but its pods run on {', '.join(wrong)}"
        yield failed(check, detail, f"set groups.{name}.nodeSelector to {PRODUCT}")
    if shared:
        detail = f"its GPUs are time-shared ({', '.join(sorted(shared))})"
        yield warning(check, detail, "use whole GPUs for training")


def drivers(site: Site) -> Iterator[Finding]:
    """Check that GPU nodes have a driver that supports the image's CUDA."""
    pods = [pod for _, pod in templates(site.cluster_or_none) if requests(pod).get(GPU)]
    if pods:
        names = {name for pod in pods for name in place(pod, site.nodes).nodes}
        yield judge_drivers([node for node in site.nodes if node["metadata"]["name"] in names])


def judge_drivers(nodes: "list[Object]") -> Finding:
    """Judge the drivers that these nodes report, if any."""
    least = DRIVERS[CUDA_MAJOR]
    needs = f"the image's CUDA {CUDA_MAJOR} needs driver {least} or later"
    versions: dict[str, str] = {}
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        if version := next((labels[name] for name in DRIVER if labels.get(name, "").isdecimal()), ""):
            versions[node["metadata"]["name"]] = version
    old = [f"{name} has {version}" for name, version in sorted(versions.items()) if int(version) < least]
    if old:
        return failed("drivers", f"{needs}; {', '.join(old)}", "update the driver or the AMI of these nodes")
    if not versions:
        return ok("drivers", f"{needs}; no node reports its driver (label {DRIVER[0]})")
    detail = f"{len(versions)} of {len(nodes)} GPU nodes report {', '.join(sorted(set(versions.values())))}"
    return ok("drivers", f"{needs}; {detail}")


def references(site: Site) -> Iterator[Finding]:
    """Check that each secret, ConfigMap and service account that the pods name exists."""
    users: dict[tuple[str, str], set[str]] = {}
    for group, pod in templates(site.cluster_or_none):
        for reference in named_by(pod):
            users.setdefault(reference, set()).add(group)
    missing, hidden = [], []
    for (kind, name), names in sorted(users.items()):
        if site.rendered_object(kind, name):
            continue
        try:
            site.api.get(site.api.path(f"{kind.lower()}s", name, "/api/v1"))
        except Missing:
            missing.append(f"{kind} {name} (for {', '.join(sorted(names))})")
        except Forbidden:
            hidden.append(f"{kind} {name}")
    if missing:
        yield failed("references", f"missing: {', '.join(missing)}", "create them before the pods")
    if hidden:
        yield warning("references", f"no right to read: {', '.join(hidden)}")
    if site.cluster_or_none and not missing and not hidden:
        detail = f"all {len(users)} secrets, ConfigMaps and service accounts that the pods refer to exist"
        yield ok("references", detail)


_SOURCES = {
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
}


def named_by(pod: Object) -> Iterator[tuple[str, str]]:
    """Yield the objects (kind, name) without which a pod cannot start."""
    for secret in pod.get("imagePullSecrets") or ():
        yield "Secret", secret["name"]
    if pod.get("serviceAccountName"):
        yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod.get("volumes") or ():
        if (inner := volume.get("secret")) and not inner.get("optional"):
            yield "Secret", inner["secretName"]
        if (inner := volume.get("configMap")) and not inner.get("optional"):
            yield "ConfigMap", inner["name"]
    for container in [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]:
        sources = [variable.get("valueFrom") or {} for variable in container.get("env") or ()]
        for source in [*(container.get("envFrom") or ()), *sources]:
            for key, kind in _SOURCES.items():
                if (inner := source.get(key)) and not inner.get("optional"):
                    yield kind, inner["name"]


def token(site: Site) -> Iterator[Finding]:
    """Check that the cluster requires a token, and that its secret exists."""
    raycluster = site.cluster_or_none
    if raycluster is None:
        return
    name = token_secret(raycluster)
    if name is None:
        detail = "authentication is off: anyone who reaches the head can run code there"
        yield warning("token", detail, "set auth.mode: token")
        return
    own = bool((raycluster["spec"].get("authOptions") or {}).get("secretName"))
    try:
        data = site.api.get(site.api.path("secrets", name, "/api/v1")).get("data") or {}
    except Missing:
        if site.rendered and not own:
            yield ok("token", f"required; the operator will create secret {name}")
        else:
            remedy = f"create it, with the token under {TOKEN_KEY}" if own else "the operator creates it: see its log"
            yield failed("token", f"secret {name} is missing", remedy)
    except Forbidden:
        yield warning("token", f"no right to read secret {name}: no logs and no stop from here", "ask for get on it")
    else:
        if data.get(TOKEN_KEY):
            yield ok("token", f"in secret {name}")
        else:
            yield failed("token", f"secret {name} has no {TOKEN_KEY}", "add the token")
