"""Checks of the API server: response, clocks, KubeRay's CRDs and operator, Prometheus, and the user's rights."""

import email.utils
import json
import time
from collections.abc import Iterator, Sequence

from sdp.kube import Object
from sdp.kube.api import OPERATOR_HINT, Forbidden
from sdp.kube.site import Finding, Site, failed, ok, warning

SKEW_NOTED_S, SKEW_REFUSED_S = 5.0, 300.0
"""Logins are often refused with a clock 5 minutes off, S3 requests with one 15 minutes off."""
OLDEST_OPERATOR = (1, 7)

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

Right = tuple[str, str, str, str]
"""verb, API group, resource, subresource"""
NEEDED: tuple[Right, ...] = (
    *((verb, "ray.io", "rayjobs", "") for verb in ("create", "get", "list", "delete")),
    *((verb, "ray.io", "rayclusters", "") for verb in ("get", "list")),
    ("get", "", "configmaps", ""),
    ("get", "", "secrets", ""),
    ("list", "", "pods", ""),
)
WAYS_IN: tuple[Right, ...] = (("create", "", "pods", "portforward"), ("get", "", "services", "proxy"))
"""Logs need one of these."""


def server(site: Site) -> Iterator[Finding]:
    """Check that the API server answers, and that its clock agrees with this machine's."""
    with site.api.explained("GET", "/version"):
        before = time.time()
        response = site.api.response("GET", "/version")
        between = (before + time.time()) / 2
        version = dict(json.loads(response.data)).get("gitVersion", "of unknown version")
    where = f"context {site.api.context}" if site.api.context else "this pod's cluster"
    yield ok("server", f"Kubernetes {version} answers ({where}, namespace {site.api.namespace})")
    yield judge_clock(between, response.headers.get("Date"))


def judge_clock(now: float, date: str | None) -> Finding:
    """Compare this machine's clock with the server's Date header."""
    try:
        # Date is truncated to whole seconds, by half a second on average.
        ahead = now - (email.utils.parsedate_to_datetime(date or "").timestamp() + 0.5)
    except ValueError:
        return warning("clock", "the API server sent no Date")
    words = f"this machine's is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the API server's"
    if abs(ahead) > SKEW_REFUSED_S:
        return failed("clock", words, "set it: logins and signed requests will be refused")
    if abs(ahead) > SKEW_NOTED_S:
        return warning("clock", words, "synchronise it by NTP")
    return ok("clock", "agrees with the API server's within 5 s")


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
    try:
        operators, hidden = site.operators, False
    except Forbidden:
        operators, hidden = [], True
    for operator in operators:
        yield _judge_operator(operator, site.api.namespace)
    if operators:
        return
    cluster = site.cluster_or_none if not site.rendered else None
    if cluster is not None and "observedGeneration" in (cluster.get("status") or {}):
        yield ok("operator", "no deployment is visible, but it manages the cluster")
    elif hidden:
        yield warning("operator", "no right to list deployments of other namespaces, and no cluster shows its work")
    else:
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


def rights(site: Site) -> Iterator[Finding]:
    """Check the rights that submit, logs and stop need; not in a pod, whose account does not submit jobs."""
    if not site.api.context:
        yield ok("rights", "not checked: people submit jobs, not this pod's account")
        return
    lacking = [right for right in NEEDED if not _allowed(site, right)]
    ways = [right for right in WAYS_IN if _allowed(site, right)]
    if lacking:
        yield failed("rights", f"may not {_words(lacking)}", f"ask for a role with these in {site.api.namespace}")
    if not ways:
        yield failed("rights", f"no access to logs: may not {_words(WAYS_IN, ' or ')}", "ask for the first")
    if not lacking and ways:
        yield ok("rights", f"enough to submit, follow and stop jobs in {site.api.namespace}")


def _allowed(site: Site, right: Right) -> bool:
    attributes = dict(zip(("verb", "group", "resource", "subresource"), right, strict=True))
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"namespace": site.api.namespace, **attributes}},
    }
    answer = site.api.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"].get("allowed"))


def _words(rights: Sequence[Right], between: str = ", ") -> str:
    return between.join(f"{verb} {resource}{f'/{sub}' if sub else ''}" for verb, _, resource, sub in rights)


def scraping(site: Site) -> Iterator[Finding]:
    """Check that Prometheus has the PodMonitor CRD."""
    if site.serves("/apis/monitoring.coreos.com/v1", "podmonitors"):
        yield ok("Prometheus", "the PodMonitor CRD exists")
    else:
        detail = "no PodMonitor CRD: nothing scrapes the metrics"
        yield warning("Prometheus", detail, "install kube-prometheus-stack if you want them")
