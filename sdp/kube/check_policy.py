"""Whether the network policies of a cluster's head let KubeRay's operator in: without it no job is ever submitted."""

from collections.abc import Iterator, Mapping, Sequence

from sdp.kube import Object
from sdp.kube.api import Forbidden, Missing
from sdp.kube.site import Finding, Site, failed, ok, warning

JOB_API = 8265
"""The head's port that the operator submits jobs to."""
CHECK = "network policy"


def operator_let_in(site: Site) -> Iterator[Finding]:
    """Check that the operator reaches the head's job API from the namespace in which it is installed."""
    if site.cluster_or_none is None:
        return
    policies = list(_of_head(site, site.cluster_or_none))
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
    for namespace in sorted({each["metadata"]["namespace"] for each in operators}):
        labels = _labels_of(site, namespace)
        if any(admits(policy, labels, site.api.namespace) for policy in policies):
            yield ok(CHECK, f"{names} lets the operator in from namespace {namespace}")
        else:
            says = f"{names} does not let the operator in from namespace {namespace}: it could submit no job"
            yield failed(CHECK, says, f"set networkPolicy.operatorNamespace to {namespace}")


def _of_head(site: Site, cluster: Object) -> Iterator[Object]:
    """Yield the policies that say who may reach the head's pod."""
    if site.rendered:
        policies = [each for each in site.rendered if each["kind"] == "NetworkPolicy"]
    else:
        policies = site.api.list(site.api.mine("networkpolicies", group="/apis/networking.k8s.io/v1"))
    template = cluster["spec"]["headGroupSpec"]["template"].get("metadata") or {}
    labels = {
        **(template.get("labels") or {}),
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
        "ray.io/group": "headgroup",
        "ray.io/is-ray-node": "yes",
    }  # the operator adds these to the template's
    for each in policies:
        spec = each["spec"]
        if "Ingress" in (spec.get("policyTypes") or ["Ingress"]) and selects(spec.get("podSelector") or {}, labels):
            yield each


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
        and (not rule.get("from") or any(_is(peer, namespace_labels, own_namespace) for peer in rule["from"]))
        for rule in policy["spec"].get("ingress") or ()
    )


def _is_job_api(port: Object) -> bool:
    number = port.get("port")
    if (port.get("protocol") or "TCP") != "TCP":
        return False
    # Without a number it is all of them, or one by the container's name.
    return not isinstance(number, int) or number <= JOB_API <= int(port.get("endPort") or number)


def _is(peer: Object, labels: Mapping[str, str], own_namespace: str) -> bool:
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"] or {}, labels)
    # A block of addresses counts as a yes: which addresses the pods have is unknown.
    return "ipBlock" in peer or labels["kubernetes.io/metadata.name"] == own_namespace


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches an object with these labels; an empty one matches all."""
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        _holds(each["operator"], labels.get(each["key"]), each.get("values") or ())
        for each in selector.get("matchExpressions") or ()
    )


def _holds(operator: str, value: str | None, values: Sequence[str]) -> bool:
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    return (value in values) == (operator == "In")
