"""Checks of one RayCluster: that it is ready, that each of its pods could ever schedule, that all it names is there."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sdp.errors import UserError, one_line
from sdp.hardware import gpus_by_accelerator
from sdp.kube.answers import Forbidden, Missing
from sdp.kube.api import Object
from sdp.kube.clusters import templates, token_secret
from sdp.kube.dashboard import TOKEN_KEY
from sdp.kube.finding import Finding, failed, ok, warning
from sdp.kube.placing import Fit, place, requests
from sdp.kube.quantity import parse, shown
from sdp.kube.site import Site
from sdp.kube.state import ClusterState, cluster_state

PRODUCT = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"
ACCELERATOR = "ray.io/accelerator-type"
SHARED = "-SHARED"
"""What the device plugin adds to the product of a GPU that pods take turns on."""

STARTING_S = 1800.0
"""A node that boots and an image that is pulled take minutes: what has not started by then waits for something else."""

_STUCK = {
    "ImagePullBackOff": "check image, tag and imagePullSecrets",
    "ErrImagePull": "check image, tag and imagePullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
    "CrashLoopBackOff": "kubectl logs --previous says why",
    "CreateContainerConfigError": "something that it refers to is missing",
}

Wanted = tuple[int, int]
"""The fewest and the most pods of a group."""


def cluster(site: Site) -> Iterator[Finding]:
    """That there is a cluster, and that it is ready."""
    try:
        found = site.cluster
    except Forbidden:
        raise  # it may be there: not to be allowed to look says nothing of it
    except UserError as error:
        yield failed("cluster", str(error).removeprefix("--cluster: "))
        return
    name = found["metadata"]["name"]
    if site.rendered:
        yield ok("cluster", f"{name}, from the manifests")
        return
    stuck = list(_stuck_pods(site, name))
    yield judge_state(cluster_state(found), stuck, datetime.now(UTC))
    yield from stuck


def judge_state(state: ClusterState, pods: "list[Finding]", now: datetime) -> Finding:
    """What a cluster's state means: one whose pods are on their way is no failure, unless they have been for long."""
    if state.state == "ready":
        return ok("cluster", f"{state.name} is ready: {state.workers} of {state.wanted} workers")
    words = f"{state.name} is {state.state}{f': {state.message}' if state.message else ''}"
    look = f"kubectl describe raycluster {state.name}"
    age_s = (now - state.started).total_seconds() if state.started else 0.0
    hopeless = state.state != "starting" or state.refused or any(each.state == "failed" for each in pods)
    if hopeless:
        return failed("cluster", words, look)
    if age_s > STARTING_S:
        return failed("cluster", f"{words}, for {age_s / 60:.0f} minutes", look)
    return warning("cluster", words, "pods are on their way: sdp doctor again in a few minutes")


def _stuck_pods(site: Site, name: str) -> Iterator[Finding]:
    pods = site.api.list(site.api.mine("pods", group="/api/v1"), labelSelector=f"ray.io/cluster={name}")
    for pod in pods:
        status, about = pod.get("status") or {}, pod["metadata"]["name"]
        for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
            waits = (container.get("state") or {}).get("waiting") or {}
            if waits.get("reason") in _STUCK:
                words = one_line(waits.get("message") or "", 200)
                yield failed(
                    "pods", f"{about}: {waits['reason']}{f' ({words})' if words else ''}", _STUCK[waits["reason"]]
                )
        for condition in status.get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                words = one_line(condition.get("message") or "")
                yield warning("pods", f"{about} is not scheduled: {words}", "see its group below")


def groups(site: Site) -> Iterator[Finding]:
    """That each group's pods would ever schedule, and that they would have the GPU that their label says."""
    found = site.cluster_or_none
    if found is None:
        return
    specs = {group["groupName"]: group for group in found["spec"].get("workerGroupSpecs") or ()}
    for name, pod in templates(found):
        wanted = (1, 1) if name == "head" else wanted_of(specs[name])
        label = (specs.get(name, {}).get("labels") or {}).get(ACCELERATOR, "")
        fit = place(pod, site.nodes)
        yield judge(name, wanted, fit, site.makers_of_nodes)
        yield from judge_products(name, label, pod, [n for n in site.nodes if n["metadata"]["name"] in fit.nodes])


def wanted_of(group: Object) -> Wanted:
    """The fewest and the most pods of a worker group."""
    hosts = int(group.get("numOfHosts") or 1)
    fewest = max(int(group.get("minReplicas") or 0), 0 if group.get("replicas") is None else int(group["replicas"]))
    most = int(group.get("maxReplicas") or fewest)
    return fewest * hosts, max(fewest, most) * hosts


def judge(name: str, wanted: Wanted, fit: Fit, makers: "list[str]") -> Finding:
    """What it means for a group that its pods fit so."""
    check, (fewest, most) = f"group {name}", wanted
    if most == 0:
        return ok(check, "asks for no pods")
    count = f"{len(fit.nodes)} node{'s' * (len(fit.nodes) != 1)}"
    if fit.room >= most:
        return ok(check, f"{count} with room for {fit.room} pods, up to {most} wanted")
    if makers:
        who = " and ".join(makers)
        if not fit.nodes:
            return warning(
                check, f"no node fits now ({fit.why_not() or 'there is none'})", f"{who} must be able to make one"
            )
        return ok(check, f"{count} with room for {fit.room} of up to {most} pods; {who} makes more")
    if not fit.nodes:
        return failed(
            check,
            f"no node would ever take its pods: {fit.why_not() or 'there are no nodes'}",
            f"change groups.{name} or the nodes",
        )
    if fit.room < fewest:
        return failed(
            check,
            f"{count} with room for {fit.room} pods, {fewest} are wanted at least ({fit.why_not()})",
            "add nodes, or lower it",
        )
    return warning(
        check, f"{count} with room for {fit.room} pods, up to {most} are wanted", "lower maxReplicas or add nodes"
    )


def judge_products(name: str, label: str, pod: Object, nodes: "list[Object]") -> Iterator[Finding]:
    """Whether the nodes that a group lands on have the GPU that jobs take it for."""
    if not requests(pod).get(GPU):
        return
    check = f"group {name}"
    if not label:
        yield failed(
            check, f"has GPUs and no label {ACCELERATOR}: jobs cannot ask for them", f"set groups.{name}.accelerator"
        )
        return
    known = {product.replace(" ", "-") for gpu in gpus_by_accelerator(label) for product in gpu.products}
    there = {(each["metadata"].get("labels") or {}).get(PRODUCT, "") for each in nodes} - {""}
    shared = {product for product in there if product.endswith(SHARED)}
    wrong = sorted({product.removesuffix(SHARED) for product in there} - known)
    if not known:
        yield warning(check, f"accelerator {label} is not in the catalogue: no cost and no MFU will be known for it")
    elif wrong:
        yield failed(
            check,
            f"says {label} ({' or '.join(sorted(known))}), but its pods land on {', '.join(wrong)}",
            f"set groups.{name}.nodeSelector to {PRODUCT}",
        )
    if shared:
        yield warning(
            check, f"its GPUs are shared in turns ({', '.join(sorted(shared))})", "take whole ones for training"
        )


def network(site: Site) -> Iterator[Finding]:
    """What is not checked here, since it takes whole nodes: what a step waits for between them."""
    found = site.cluster_or_none
    if found is None:
        return
    wide: dict[str, int] = {}
    for group in found["spec"].get("workerGroupSpecs") or ():
        label = (group.get("labels") or {}).get(ACCELERATOR, "")
        if label and requests(group["template"]["spec"]).get(GPU):
            wide[label] = wide.get(label, 0) + wanted_of(group)[1]
    for label, most in wide.items():
        if most > 1:
            do = f"sdp doctor --all-reduce {label} takes two of them for a minute"
            yield warning("all-reduce", f"between {label} nodes is not measured", do)


def quotas(site: Site) -> Iterator[Finding]:
    """That the namespace's quotas allow the cluster at its smallest, and at its largest."""
    found = site.cluster_or_none
    if found is None:
        return
    there = site.api.list(site.api.mine("resourcequotas", group="/api/v1"))
    plain = [each for each in there if not each["spec"].get("scopes") and not each["spec"].get("scopeSelector")]
    if not plain:
        yield ok("quotas", f"none on namespace {site.api.namespace}")
    least, most = total(found, 0), total(found, 1)
    for each in plain:
        hard = (each.get("status") or {}).get("hard") or each["spec"].get("hard") or {}
        yield _judge_quota(each["metadata"]["name"], hard, least, most)


def _judge_quota(
    name: str, hard: Mapping[str, str], least: Mapping[str, Decimal], most: Mapping[str, Decimal]
) -> Finding:
    short, tight = [], []
    for resource, limit in hard.items():
        allowed = parse(limit)
        kind = resource.removeprefix("requests.").removeprefix("limits.").removeprefix("count/")
        words = "{} of " + resource + f", {shown(allowed, resource)} allowed"
        if least.get(kind, Decimal(0)) > allowed:
            short.append(words.format(shown(least[kind], resource)))
        elif most.get(kind, Decimal(0)) > allowed:
            tight.append(words.format(shown(most[kind], resource)))
    check = f"quota {name}"
    if short:
        return failed(check, f"the cluster at its smallest needs {'; '.join(short)}", "raise it, or lower minReplicas")
    if tight:
        return warning(check, f"the cluster at its largest needs {'; '.join(tight)}", "raise it, or lower maxReplicas")
    return ok(check, "allows the cluster at its largest")


def total(raycluster: Object, which: int) -> dict[str, Decimal]:
    """What a cluster's pods ask for together: at its smallest (0) or at its largest (1)."""
    specs = {group["groupName"]: group for group in raycluster["spec"].get("workerGroupSpecs") or ()}
    sums: dict[str, Decimal] = {"pods": Decimal(0)}
    for name, pod in templates(raycluster):
        count = 1 if name == "head" else wanted_of(specs[name])[which]
        sums["pods"] += count
        for resource, amount in requests(pod).items():
            sums[resource] = sums.get(resource, Decimal(0)) + amount * count
    return sums


def references(site: Site) -> Iterator[Finding]:
    """That each secret, ConfigMap and service account that the pods name is there."""
    found = site.cluster_or_none
    if found is None:
        return
    named: dict[tuple[str, str], set[str]] = {}
    for group, pod in templates(found):
        for kind, name in named_by(pod):
            named.setdefault((kind, name), set()).add(group)
    missing, hidden = [], []
    for (kind, name), users in sorted(named.items()):
        if site.made(kind, name):
            continue
        try:
            site.api.get(site.api.mine(f"{kind.lower()}s", name, "/api/v1"))
        except Missing:
            missing.append(f"{kind} {name} (for {', '.join(sorted(users))})")
        except Forbidden:
            hidden.append(f"{kind} {name}")
    if missing:
        yield failed("references", f"not there: {', '.join(missing)}", "make them before the pods")
    if hidden:
        yield warning("references", f"may not be looked at: {', '.join(hidden)}")
    if not missing and not hidden:
        yield ok(
            "references", f"all {len(named)} secrets, ConfigMaps and service accounts that the pods name are there"
        )


def named_by(pod: Object) -> Iterator[tuple[str, str]]:
    """What a pod cannot start without: (kind, name)."""
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
        sources: list[dict[str, Any]] = [*(container.get("envFrom") or ())]
        sources += [variable.get("valueFrom") or {} for variable in container.get("env") or ()]
        for source in sources:
            for key, kind in _SOURCES.items():
                if (inner := source.get(key)) and not inner.get("optional"):
                    yield kind, inner["name"]


_SOURCES = {
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
}


def token(site: Site) -> Iterator[Finding]:
    """That the cluster asks for a token, and that it has one."""
    found = site.cluster_or_none
    if found is None:
        return
    name = token_secret(found)
    if name is None:
        yield warning(
            "token", "authentication is off: whoever reaches the head runs code there", "set auth.mode: token"
        )
        return
    try:
        data = site.api.get(site.api.mine("secrets", name, "/api/v1")).get("data") or {}
    except Missing:
        own = bool((found["spec"].get("authOptions") or {}).get("secretName"))
        if site.rendered and not own:
            yield ok("token", f"asked for; the operator will make secret {name}")
        else:
            do = f"make it, with the token under {TOKEN_KEY}" if own else "the operator makes it: see its log"
            yield failed("token", f"secret {name} is not there", do)
        return
    except Forbidden:
        yield warning("token", f"secret {name} may not be read: no logs and no stop from here", "ask for get on it")
        return
    if data.get(TOKEN_KEY):
        yield ok("token", f"secret {name} holds it")
    else:
        yield failed("token", f"secret {name} has no {TOKEN_KEY}", "put the token there")
