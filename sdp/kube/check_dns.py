"""Whether downloads, which look up many hosts, have a resolver that answers, and with one question for each name."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sdp.kube import Object
from sdp.kube.check_jobs import JobDraft
from sdp.kube.clusters import templates
from sdp.kube.placing import GPU, requests
from sdp.kube.site import Finding, ok, warning

CHECK = "DNS"
_NAMES = ("example.com", "example.net", "example.org", "iana.org")
_WITHIN_S = 5.0
_DO = "set dnsConfig: {options: [{name: ndots, value: '1'}]}; docs/dns.md"


def of_groups(drafts: Sequence[JobDraft], cluster: Object | None) -> Iterator[Finding]:
    """Check that the groups that download look names up as they are, without the cluster's search domains."""
    if not any(draft.job == "download" for draft in drafts):
        return
    for name, pod in templates(cluster):
        options = (pod.get("dnsConfig") or {}).get("options") or ()
        ndots = next((each.get("value") for each in options if each.get("name") == "ndots"), "5")
        if name != "head" and not requests(pod).get(GPU) and str(ndots) not in ("0", "1"):
            yield warning(CHECK, f"group {name} asks for each host up to {ndots} times (ndots:{ndots})", _DO)


def of_this_machine(settings: Path = Path("/etc/resolv.conf"), names: Sequence[str] = _NAMES) -> Iterator[Finding]:
    """Check that this machine's resolver answers, in one line."""
    lines = [line.split() for line in (settings.read_text("utf-8") if settings.exists() else "").splitlines()]
    search = next((words[1:] for words in reversed(lines) if words[:1] == ["search"]), [])
    options = [option for words in lines if words[:1] == ["options"] for option in words[1:]]
    ndots = next((int(each[6:]) for each in options if each.startswith("ndots:") and each[6:].isdigit()), 1)
    how = f"ndots:{ndots}, {len(search)} search domains"
    began, resolved = time.monotonic(), set[str]()
    threads = [threading.Thread(target=_resolve, args=(name, resolved), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + _WITHIN_S - time.monotonic()))
    missing = [name for name in names if name not in resolved]
    seconds = time.monotonic() - began
    if missing:
        says = f"no address for {', '.join(missing)} within {_WITHIN_S:g} s ({how})"
        yield warning(CHECK, says, "downloads need a resolver that knows the internet; docs/dns.md")
    elif ndots > 1 and search:
        yield warning(CHECK, f"each host is asked for up to {1 + len(search)} times ({how})", _DO)
    else:
        yield ok(CHECK, f"{len(names)} names have addresses, after {seconds:.2f} s ({how})")


def _resolve(name: str, resolved: set[str]) -> None:
    try:
        socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)
    except OSError:
        return
    resolved.add(name)
