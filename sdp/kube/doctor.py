"""`sdp doctor`: checks for the usual problems of a cluster, before money is spent.

Each check looks at one thing. None changes anything, except that an object of 64 bytes is written to each output and
deleted again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from sdp.errors import SdpError, UserError
from sdp.kube import check_cluster, check_jobs
from sdp.kube.api import Forbidden, Unreachable
from sdp.kube.site import Finding, Site, failed, mounted_texts, warning

Check = Callable[[Site], Iterable[Finding]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("CRDs", check_cluster.resources),
    ("operator", check_cluster.operator),
    ("cluster", check_cluster.cluster),
    ("groups", check_cluster.groups),
)


def examine(site: Site | None, no_site: str = "", *, jobs_folder: Path | None = None) -> Iterator[Finding]:
    """Yield every finding. `no_site` is the reason for checking without a cluster, as in a pod without an account."""
    texts = mounted_texts(jobs_folder)
    in_pod = bool(texts)
    if site is None:
        finding = warning if in_pod else failed
        yield finding("server", no_site, "the checks of Kubernetes are skipped" if in_pod else "")
    else:
        server = list(run_check("server", check_cluster.server, site))
        yield from server
        if server[0].state == "failed":
            site = None
    if site is not None:
        for name, check in CHECKS:
            yield from run_check(name, check, site)
        if site.rendered or not in_pod:
            try:
                texts = site.texts
            except SdpError as error:
                yield warning("jobs", f"cannot read the cluster's configurations: {error}")
    drafts, findings = check_jobs.read(texts)
    yield from findings
    if site is not None:
        yield from run_check("placement", lambda site: check_jobs.accelerators(drafts, site.cluster_or_none), site)
    yield from check_jobs.memory(drafts)
    yield from check_jobs.access(drafts, in_pod=in_pod)


def run_check(name: str, check: Check, site: Site) -> Iterator[Finding]:
    """Yield a check's findings, or one that says why the check failed."""
    try:
        yield from check(site)
    except Forbidden as error:
        yield warning(name, f"not checked: {error}")
    except (UserError, Unreachable) as error:
        yield failed(name, str(error))


def totals(findings: Sequence[Finding]) -> str:
    """Return the summary line."""
    counts = {state: sum(finding.state == state for finding in findings) for state in ("failed", "warning", "ok")}
    return f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed"


def as_json(findings: Sequence[Finding]) -> str:
    """Return all findings as JSON."""
    healthy = all(finding.state != "failed" for finding in findings)
    return json.dumps({"ok": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2)
