"""Checks of the network: policies that block KubeRay's operator, name resolution for downloads, GPU networks."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sdp.kube import Object
from sdp.kube.api import Forbidden, Missing
from sdp.kube.check_jobs import JobDraft
from sdp.kube.clusters import templates
from sdp.kube.placing import GPU, requests
from sdp.kube.site import Finding, Site, failed, ok, warning

POLICY, DNS = "network policy", "DNS"
JOB_API = 8265
"""Port of the head to which the operator submits jobs."""
_NAMES = ("example.com", "example.net", "example.org", "iana.org")
_WITHIN_S = 5.0
_SET_NDOTS = "set dnsConfig: {options: [{name: ndots, value: '1'}]}; docs/dns.md"


def operator_let_in(site: Site) -> Iterator[Finding]:
    """Check that network policies let the operator reach the head's job API from the operator's namespace."""
    if site.cluster_or_none is None:
        return
    policies = list(_of_head(site, site.cluster_or_none))
    if not policies:
        yield ok(POLICY, "none restricts the head")
        return
    names = ", ".join(policy["metadata"]["name"] for policy in policies)
    namespaces = {operator["metadata"]["namespace"] for operator in site.operators}
    if not namespaces:
        yield warning(POLICY, f"cannot tell whether {names} lets the operator in: it has no deployment")
    for namespace in sorted(namespaces):
        labels = _labels_of(site, namespace)
        if any(admits(policy, labels, site.api.namespace) for policy in policies):
            yield ok(POLICY, f"{names} lets the operator in from namespace {namespace}")
        else:
            detail = f"{names} does not let the operator in from namespace {namespace}: it cannot submit jobs"
            yield failed(POLICY, detail, f"set networkPolicy.operatorNamespace to {namespace}")


def _of_head(site: Site, cluster: Object) -> Iterator[Object]:
    """Yield the policies on ingress to the head's pod."""
    if site.rendered:
        policies = [document for document in site.rendered if document["kind"] == "NetworkPolicy"]
    else:
        policies = site.api.list(site.api.path("networkpolicies", group="/apis/networking.k8s.io/v1"))
    template = cluster["spec"]["headGroupSpec"]["template"].get("metadata") or {}
    labels = {
        **(template.get("labels") or {}),
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
        "ray.io/group": "headgroup",
        "ray.io/is-ray-node": "yes",
    }  # the template's labels, and those that the operator adds
    for policy in policies:
        spec = policy["spec"]
        if "Ingress" in (spec.get("policyTypes") or ["Ingress"]) and selects(spec.get("podSelector") or {}, labels):
            yield policy


def _labels_of(site: Site, namespace: str) -> Mapping[str, str]:
    try:
        metadata = site.api.get(f"/api/v1/namespaces/{namespace}")["metadata"]
    except (Forbidden, Missing):
        metadata = {}
    return {"kubernetes.io/metadata.name": namespace, **(metadata.get("labels") or {})}


def admits(policy: Object, namespace_labels: Mapping[str, str], own_namespace: str) -> bool:
    """Return whether a policy lets any pod of a namespace reach the job API."""
    return any(
        (not rule.get("ports") or any(map(_is_job_api, rule["ports"])))
        and (not rule.get("from") or any(_covers(peer, namespace_labels, own_namespace) for peer in rule["from"]))
        for rule in policy["spec"].get("ingress") or ()
    )


def _is_job_api(port: Object) -> bool:
    number = port.get("port")
    if (port.get("protocol") or "TCP") != "TCP":
        return False
    # Without a number, the rule covers all ports or names a container's port.
    return not isinstance(number, int) or number <= JOB_API <= int(port.get("endPort") or number)


def _covers(peer: Object, labels: Mapping[str, str], own_namespace: str) -> bool:
    """Return whether a rule's peer may be a pod of the namespace with these labels."""
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"] or {}, labels)
    # An address block counts as a match, since the operator's address is unknown.
    return "ipBlock" in peer or labels["kubernetes.io/metadata.name"] == own_namespace


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches an object with these labels; an empty one matches all."""
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        _holds(expression["operator"], labels.get(expression["key"]), expression.get("values") or ())
        for expression in selector.get("matchExpressions") or ()
    )


def _holds(operator: str, value: str | None, values: Sequence[str]) -> bool:
    """Return whether an expression of a label selector holds for a label's value."""
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    return (value in values) == (operator == "In")


def dns_of_groups(drafts: Sequence[JobDraft], cluster: Object | None) -> Iterator[Finding]:
    """Check that the groups that download resolve host names without trying the cluster's search domains first."""
    if not any(draft.job == "download" for draft in drafts):
        return
    for name, pod in templates(cluster):
        options = (pod.get("dnsConfig") or {}).get("options") or ()
        ndots = next((option.get("value") for option in options if option.get("name") == "ndots"), "5")
        if name != "head" and not requests(pod).get(GPU) and str(ndots) not in ("0", "1"):
            yield warning(DNS, f"group {name} makes up to {ndots} lookups per host (ndots:{ndots})", _SET_NDOTS)


def dns_of_this_machine(settings: Path = Path("/etc/resolv.conf"), names: Sequence[str] = _NAMES) -> Iterator[Finding]:
    """Check that this machine's resolver answers, and without trying search domains first."""
    lines = [line.split() for line in (settings.read_text("utf-8") if settings.exists() else "").splitlines()]
    search = next((words[1:] for words in reversed(lines) if words[:1] == ["search"]), [])
    options = [option for words in lines if words[:1] == ["options"] for option in words[1:]]
    ndots = next((int(option[6:]) for option in options if option.startswith("ndots:") and option[6:].isdigit()), 1)
    resolver = f"ndots:{ndots}, {len(search)} search domains"
    began, resolved = time.monotonic(), set[str]()
    threads = [threading.Thread(target=_resolve, args=(name, resolved), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + _WITHIN_S - time.monotonic()))
    missing = [name for name in names if name not in resolved]
    seconds = time.monotonic() - began
    if missing:
        detail = f"no address for {', '.join(missing)} within {_WITHIN_S:g} s ({resolver})"
        yield warning(DNS, detail, "downloads need a resolver for public names; docs/dns.md")
    elif ndots > 1 and search:
        yield warning(DNS, f"each host takes up to {1 + len(search)} lookups ({resolver})", _SET_NDOTS)
    else:
        yield ok(DNS, f"{len(names)} names resolved in {seconds:.2f} s ({resolver})")


def _resolve(name: str, resolved: set[str]) -> None:
    try:
        socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)
    except OSError:
        return
    resolved.add(name)
