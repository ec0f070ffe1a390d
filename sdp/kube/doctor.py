"""`sdp doctor`: what usually goes wrong on a cluster, found before money is spent.

Each check is a function that looks at one thing. None changes anything, but for an object of 64 bytes that is written
to each output and deleted again.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from sdp.errors import SdpError, UserError
from sdp.kube import check_cluster, check_images, check_jobs, check_policy, check_server
from sdp.kube.answers import Forbidden, Unreachable
from sdp.kube.api import Api
from sdp.kube.check_cluster import ACCELERATOR
from sdp.kube.clusters import find_cluster
from sdp.kube.finding import Finding, failed, warning
from sdp.kube.follow import follow
from sdp.kube.placing import requests
from sdp.kube.rayjob import Options, make_all_reduce
from sdp.kube.site import Site, mounted_texts
from sdp.kube.submit import create

Check = Callable[[Site], Iterable[Finding]]
Say = Callable[[str], None]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("CRDs", check_server.resources),
    ("operator", check_server.operator),
    ("rights", check_server.rights),
    ("cluster", check_cluster.cluster),
    ("images", check_images.images),
    ("groups", check_cluster.groups),
    ("quotas", check_cluster.quotas),
    ("references", check_cluster.references),
    ("token", check_cluster.token),
    ("network policy", check_policy.operator_let_in),
    ("all-reduce", check_cluster.network),
    ("Prometheus", check_server.scraping),
)


def examine(site: Site | None, no_site: str = "", *, jobs_folder: Path | None = None) -> Iterator[Finding]:
    """Every finding, as it is made. `no_site` says why no cluster is looked at, as in a pod without an account."""
    mounted = mounted_texts(jobs_folder)
    in_pod = bool(mounted)
    reached = False
    if site is None:
        finding = warning if in_pod else failed
        yield finding("server", no_site, "the checks of Kubernetes are left out" if in_pod else "")
    else:
        server = list(guarded("server", check_server.server, site))
        yield from server
        reached = all(each.state != "failed" or each.check != "server" for each in server)
    if site is not None and reached:
        for name, check in CHECKS:
            yield from guarded(name, check, site)
    texts: dict[str, str] = mounted
    if site is not None and reached and (site.rendered or not mounted):
        try:
            texts = site.texts
        except SdpError as error:
            yield warning("jobs", f"the cluster's configurations cannot be read: {error}")
    told, findings = check_jobs.read(texts)
    yield from findings
    if site is not None and reached:
        yield from guarded("placement", lambda site: _placement(told, site), site)
    yield from check_jobs.storage(told, in_pod=in_pod)
    yield from check_jobs.models(told, in_pod=in_pod)


def _placement(told: list[check_jobs.Told], site: Site) -> Iterator[Finding]:
    cluster = site.cluster_or_none
    if cluster is not None:
        yield from check_jobs.accelerators(told, cluster)


def all_reduce(api: Api, accelerator: str, nodes: int, cluster: str | None, out: BinaryIO, say: Say) -> int:
    """Measure between whole nodes of a group, on the cluster; returns the job's exit code."""
    if nodes < 2:
        raise UserError(f"--nodes: expected 2 or more, got {nodes}; there is no network in one node")
    found = find_cluster(api, cluster)
    groups = found["spec"].get("workerGroupSpecs") or ()
    labels = [(group.get("labels") or {}).get(ACCELERATOR, "") for group in groups]
    if accelerator not in labels:
        have = ", ".join(sorted({label for label in labels if label})) or "none"
        raise UserError(f"--all-reduce: expected an accelerator of the cluster's groups ({have}), got {accelerator!r}")
    gpus = int(requests(groups[labels.index(accelerator)]["template"]["spec"]).get(check_cluster.GPU, 0))
    job = make_all_reduce(nodes, gpus, accelerator, Options(cluster=found["metadata"]["name"]))
    return follow(api, create(api, job, say)["metadata"]["name"], out, say)


def guarded(name: str, check: Check, site: Site) -> Iterator[Finding]:
    """A check's findings; that it could not be made is one, too."""
    try:
        yield from check(site)
    except Forbidden as error:
        yield warning(name, f"could not be looked at: {error}")
    except (UserError, Unreachable) as error:
        yield failed(name, str(error))


def summary(findings: list[Finding]) -> str:
    """The last line."""
    counts = {state: sum(each.state == state for each in findings) for state in ("failed", "warning", "ok")}
    return f"{counts['ok']} ok, {counts['warning']} to look at, {counts['failed']} failed"


def as_json(findings: list[Finding]) -> str:
    """All of it for programs."""
    healthy = all(each.state != "failed" for each in findings)
    return json.dumps({"ok": healthy, "findings": [each.to_json() for each in findings]}, indent=2)
