"""Whether the network policies of a cluster's pods let KubeRay's operator in: without it no job is ever submitted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdp.kube.answers import Forbidden, Missing
from sdp.kube.api import Object
from sdp.kube.finding import Finding, failed, ok, warning
from sdp.kube.placing import selects
from sdp.kube.site import Site

JOB_API = 8265
"""The head's port that the operator submits jobs to."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
CHECK = "network policy"


@dataclass(frozen=True, slots=True)
class Caller:
    """A pod that wants in, by its labels and its namespace's."""

    labels: Mapping[str, str] | None
    """None has whatever labels are asked for."""
    namespace: str
    namespace_labels: Mapping[str, str]


def operator_let_in(site: Site) -> Iterator[Finding]:
    """That the operator reaches the head's job API, wherever it has been installed."""
    cluster = site.cluster_or_none
    if cluster is None:
        return
    policies = list(_of_head(site, cluster))
    if not policies:
        yield ok(CHECK, "none keeps anybody from the head")
        return
    try:
        operators = site.operators
    except Forbidden:
        operators = []
    names = ", ".join(each["metadata"]["name"] for each in policies)
    if not operators:
        yield warning(CHECK, f"whether {names} lets the operator in is unknown: its deployment is not to be seen")
        return
    for each in operators:
        caller = _caller(site, each)
        if any(admits(policy, caller, JOB_API, site.api.namespace) for policy in policies):
            yield ok(CHECK, f"{names} lets the operator in from namespace {caller.namespace}")
            continue
        anybody = replace(caller, labels=None)
        near = any(admits(policy, anybody, JOB_API, site.api.namespace) for policy in policies)
        yield failed(
            CHECK,
            f"{names} does not let the operator in from namespace {caller.namespace}: it could submit no job",
            "its pods lack the labels of KubeRay's own chart"
            if near
            else f"set networkPolicy.operatorNamespace to {caller.namespace}",
        )


def _of_head(site: Site, cluster: Object) -> Iterator[Object]:
    """The policies that say who may reach the head's pod."""
    if site.rendered:
        found = [each for each in site.rendered if each["kind"] == "NetworkPolicy"]
    else:
        found = site.api.list(site.api.mine("networkpolicies", group="/apis/networking.k8s.io/v1"))
    template = cluster["spec"]["headGroupSpec"]["template"].get("metadata") or {}
    labels = {
        **(template.get("labels") or {}),
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
        "ray.io/group": "headgroup",
        "ray.io/is-ray-node": "yes",
    }  # the operator puts these on, whatever the template says
    for each in found:
        spec = each["spec"]
        if "Ingress" in (spec.get("policyTypes") or ["Ingress"]) and selects(spec.get("podSelector") or {}, labels):
            yield each


def _caller(site: Site, deployment: Object) -> Caller:
    namespace = deployment["metadata"]["namespace"]
    try:
        about = site.api.get(f"/api/v1/namespaces/{namespace}")["metadata"]
    except (Forbidden, Missing):
        about = {}
    labels = {NAMESPACE_NAME: namespace, **(about.get("labels") or {})}
    template = deployment["spec"]["template"].get("metadata") or {}
    return Caller(template.get("labels") or {}, namespace, labels)


def admits(policy: Object, caller: Caller, port: int, own_namespace: str) -> bool:
    """Whether one policy lets a pod in to a TCP port; several let in what any of them does."""
    for rule in policy["spec"].get("ingress") or ():
        if _has_port(rule.get("ports") or (), port):
            peers = rule.get("from") or ()
            if not peers or any(_is(peer, caller, own_namespace) for peer in peers):
                return True
    return False


def _has_port(ports: Iterable[Any], port: int) -> bool:
    told = list(ports)
    return not told or any(
        (each.get("protocol") or "TCP") == "TCP"
        and (
            not isinstance(first := each.get("port"), int)  # all of them, or one by a name of the container's
            or first <= port <= int(each.get("endPort") or first)
        )
        for each in told
    )


def _is(peer: Object, caller: Caller, own_namespace: str) -> bool:
    if "ipBlock" in peer:  # where a pod's address lies is not ours to know: taken for a yes
        return True
    if "namespaceSelector" in peer:
        here = selects(peer["namespaceSelector"] or {}, caller.namespace_labels)
    else:
        here = caller.namespace == own_namespace
    return here and (caller.labels is None or selects(peer.get("podSelector") or {}, caller.labels))
