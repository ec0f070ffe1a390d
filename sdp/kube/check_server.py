"""Checks of the API server: there, on time, with KubeRay and Prometheus in it, and with our rights."""

from collections.abc import Iterator
from typing import Any

from sdp.kube.answers import OPERATOR_HINT, Forbidden
from sdp.kube.finding import Finding, failed, ok, warning
from sdp.kube.site import Site

SKEW_NOTED_S, SKEW_REFUSED_S = 5.0, 300.0
"""Tokens and certificates bear a little; logins are often refused from five minutes on, requests to S3 from 15."""
OLDEST_OPERATOR = (1, 7)

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "rayclusters": {
        "spec": ("authOptions", "upgradeStrategy", "autoscalerOptions", "gcsFaultToleranceOptions"),
        "spec.authOptions": ("mode", "secretName"),
        "spec.autoscalerOptions": ("version",),
        "spec.workerGroupSpecs": ("labels", "priority", "idleTimeoutSeconds"),
    },
    "rayjobs": {"spec": ("submissionMode", "clusterSelector", "runtimeEnvYAML", "entrypoint")},
}
"""What the chart and the manifests use of ray.io/v1, and older CRDs silently drop."""

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
"""One of them leads to logs."""
USEFUL: tuple[Right, ...] = (("watch", "ray.io", "rayjobs", ""), ("list", "", "events", ""))


def server(site: Site) -> Iterator[Finding]:
    """That the API server answers, and that our clocks agree."""
    reply = site.api.ask("GET", "/version")
    where = f"context {site.api.context}" if site.api.context else "this pod's cluster"
    version = (reply.data or {}).get("gitVersion", "of unknown version")
    yield ok("server", f"Kubernetes {version} answers ({where}, namespace {site.api.namespace})")
    if reply.ahead_s is None:
        yield warning("clock", "the API server told no time")
        return
    off = abs(reply.ahead_s)
    words = f"{off:.0f} s {'ahead of' if reply.ahead_s > 0 else 'behind'} the API server's"
    if off > SKEW_REFUSED_S:
        yield failed("clock", f"this machine's is {words}", "set it: logins and signed requests are refused")
    elif off > SKEW_NOTED_S:
        yield warning("clock", f"this machine's is {words}", "let it be set by NTP")
    else:
        yield ok("clock", "agrees with the API server's within 5 s")


def resources(site: Site) -> Iterator[Finding]:
    """That ray.io/v1 is served, with the fields that we use."""
    missing = [kind for kind in FIELDS if not site.serves("/apis/ray.io/v1", kind)]
    if missing:
        yield failed("CRDs", f"ray.io/v1 does not have {' and '.join(missing)}", OPERATOR_HINT)
        return
    lacking: list[str] = []
    for kind, wanted in FIELDS.items():
        try:
            crd = site.api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}.ray.io")
        except Forbidden:
            yield warning("CRDs", f"{kind}.ray.io is there; its fields may not be looked at")
            return
        lacking += [f"{kind}: {path}" for path in lacking_fields(crd, wanted)]
    if lacking:
        yield failed(
            "CRDs",
            f"older than the chart: no {', '.join(lacking)}",
            "apply those of KubeRay 1.7 or later server-side (helm upgrade of the operator leaves CRDs as they are)",
        )
    else:
        yield ok("CRDs", "ray.io/v1 has RayCluster and RayJob with all that the chart uses")


def lacking_fields(crd: dict[str, Any], wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """The fields that version v1 of a CRD does not have."""
    versions = {each["name"]: each for each in crd["spec"]["versions"]}
    if "v1" not in versions or not versions["v1"].get("served", True):
        return ["v1"]
    schema = (versions["v1"].get("schema") or {}).get("openAPIV3Schema") or {}
    return [f"{path}.{name}" for path, names in wanted.items() for name in names if name not in _fields(schema, path)]


def _fields(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for part in path.split("."):
        schema = (schema.get("properties") or {}).get(part) or {}
        schema = schema.get("items") or schema
    return schema.get("properties") or {}


def operator(site: Site) -> Iterator[Finding]:
    """That KubeRay's operator runs, is new enough, and looks after our namespace."""
    try:
        found = site.operators
    except Forbidden:
        found = []
        hidden = True
    else:
        hidden = False
    if not found:
        yield _without_deployment(site, hidden)
        return
    for each in found:
        about = each["metadata"]
        name = f"{about['namespace']}/{about['name']}"
        container = each["spec"]["template"]["spec"]["containers"][0]
        version = _version_of(about, container)
        if not (each.get("status") or {}).get("availableReplicas"):
            yield failed("operator", f"{name} does not run", f"kubectl -n {about['namespace']} describe pods")
        elif version and version[:2] < OLDEST_OPERATOR:
            yield failed("operator", f"{name} is {_dotted(version)}", "upgrade it to 1.7 or later, its CRDs too")
        elif not _watches(container, site.api.namespace):
            yield failed(
                "operator", f"{name} does not watch namespace {site.api.namespace}", "see its --watch-namespace"
            )
        elif version is None:
            yield warning("operator", f"{name} runs, which version its image does not say", "1.7 or later is needed")
        else:
            yield ok("operator", f"{name} runs, version {_dotted(version)}")


def _without_deployment(site: Site, hidden: bool) -> Finding:
    cluster = site.cluster_or_none if not site.rendered else None
    seen = cluster is not None and "observedGeneration" in (cluster.get("status") or {})
    if seen:
        return ok("operator", "no deployment of it is to be seen, but it looks after the cluster")
    if hidden:
        return warning("operator", "deployments of other namespaces may not be listed, and no cluster shows its work")
    return failed("operator", "no deployment of KubeRay's operator", OPERATOR_HINT)


def _version_of(about: dict[str, Any], container: dict[str, Any]) -> tuple[int, ...] | None:
    """From the image's tag, else from the chart's label."""
    tag = container.get("image", "").partition("@")[0].rpartition(":")[2]
    for text in (tag, (about.get("labels") or {}).get("app.kubernetes.io/version", "")):
        parts = text.removeprefix("v").partition("-")[0].split(".")
        if len(parts) >= 2 and all(part.isdigit() for part in parts):
            return tuple(map(int, parts))
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _watches(container: dict[str, Any], namespace: str) -> bool:
    arguments = [*(container.get("command") or ()), *(container.get("args") or ())]
    for number, argument in enumerate(arguments):
        flag, _, value = argument.lstrip("-").partition("=")
        if flag == "watch-namespace":
            value = value or (arguments[number + 1] if number + 1 < len(arguments) else "")
            return not value or namespace in value.split(",")
    return True


def rights(site: Site) -> Iterator[Finding]:
    """That we may do what submit, logs and stop do; a pod's own account is not the one that does it."""
    if not site.api.context:
        yield ok("rights", "left out: jobs are submitted by people, not by this pod's account")
        return
    lacking = [right for right in NEEDED if not _allowed(site, right)]
    ways = [right for right in WAYS_IN if _allowed(site, right)]
    useful = [right for right in USEFUL if not _allowed(site, right)]
    if lacking:
        yield failed("rights", f"may not {_words(lacking)}", f"ask for a role with these in {site.api.namespace}")
    if not ways:
        yield failed("rights", f"no way to logs: may not {_words(WAYS_IN, ' or ')}", "ask for the first")
    if useful:
        yield warning("rights", f"may not {_words(useful)}", "sdp asks now and then instead")
    if not lacking and ways and not useful:
        yield ok("rights", f"enough to submit, follow and stop jobs in {site.api.namespace}")


def _allowed(site: Site, right: Right) -> bool:
    verb, group, resource, subresource = right
    attributes = {"namespace": site.api.namespace, "verb": verb, "group": group, "resource": resource}
    if subresource:
        attributes["subresource"] = subresource
    answer = site.api.post(
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    return bool(answer["status"].get("allowed"))


def _words(rights: "tuple[Right, ...] | list[Right]", between: str = ", ") -> str:
    return between.join(f"{verb} {resource}{f'/{sub}' if sub else ''}" for verb, _, resource, sub in rights)


def scraping(site: Site) -> Iterator[Finding]:
    """That Prometheus can be told what to scrape."""
    if site.serves("/apis/monitoring.coreos.com/v1", "podmonitors"):
        yield ok("Prometheus", "PodMonitors are known here")
    else:
        yield warning(
            "Prometheus",
            "no PodMonitor CRD: metrics are scraped by nobody",
            "install kube-prometheus-stack if you want them",
        )
