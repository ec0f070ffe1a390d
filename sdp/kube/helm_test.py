"""The checks of `helm test`, which run in a pod of the release.

    python -m sdp.kube.helm_test cluster http://sdp-head-svc:8265 --ray-version 2.60.0 --nodes 3
    python -m sdp.kube.helm_test monitoring http://prometheus-operated:9090 --pool podMonitor/monitoring/sdp-exporter/0

The pod has no rights in Kubernetes. The module needs only the standard library, because the exporter's image has little
else.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from sdp.console import say
from sdp.errors import SdpError, one_line

TOKEN_ENV = "RAY_AUTH_TOKEN"
"""Ray's name for the token's variable; without a value, the cluster requires no token."""
_TIMEOUT_S = 20.0


def check_cluster(url: str, ray_version: str, nodes: int, token: str) -> str:
    """Check that a cluster's head answers with its token and not without, and return its nodes in words."""
    if token:
        try:
            _json(f"{url}/api/jobs/")
        except urllib.error.HTTPError as error:
            if error.code not in (401, 403):
                raise
        else:
            raise SdpError(f"{url}: the head answers without the token; check auth.mode and restart the head")
    version = str(_json(f"{url}/api/version", token)["ray_version"])
    if version != ray_version:
        raise SdpError(f"rayVersion: expected the image's version, {version}, got {ray_version}; set the value")
    jobs = _json(f"{url}/api/jobs/", token)
    alive = sum(
        node["raylet"].get("state") == "ALIVE" for node in _json(f"{url}/nodes?view=summary", token)["data"]["summary"]
    )
    if alive < nodes:
        raise SdpError(f"nodes: expected {nodes} or more, got {alive}; `sdp status` shows what the others wait for")
    return f"Ray {version} has {alive} nodes and knows {len(jobs)} jobs"


def check_monitoring(url: str, pools: Sequence[str], groups: Sequence[str]) -> str:
    """Check that Prometheus has the release's scrape jobs and rules and reaches its targets; return a summary."""
    known = set(_json(f"{url}/api/v1/scrape_pools")["data"]["scrapePools"])
    if missing := sorted(set(pools) - known):
        raise SdpError(
            f"{url}: no scrape job {', '.join(missing)}; Prometheus takes a minute to load them, and selects "
            "PodMonitors by their labels (monitorLabels)"
        )
    loaded = {group["name"] for group in _json(f"{url}/api/v1/rules")["data"]["groups"]}
    if missing := sorted(set(groups) - loaded):
        raise SdpError(f"{url}: no rules {', '.join(missing)}; Prometheus selects them by their labels (monitorLabels)")
    targets = _json(f"{url}/api/v1/targets?state=active")["data"]["activeTargets"]
    own = [target for target in targets if target["scrapePool"] in pools]
    for target in own:
        if target["health"] == "down":
            raise SdpError(f"{target['scrapeUrl']}: Prometheus cannot scrape it: {one_line(target['lastError'], 200)}")
    return f"Prometheus has {len(set(pools))} scrape jobs of this release with {len(own)} targets, none of them down"


def _json(url: str, token: str = "") -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check one release and print the result; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sdp.kube.helm_test")
    charts = parser.add_subparsers(dest="chart", required=True)
    cluster = charts.add_parser("cluster")
    cluster.add_argument("url")
    cluster.add_argument("--ray-version", required=True)
    cluster.add_argument("--nodes", type=int, required=True)
    monitoring = charts.add_parser("monitoring")
    monitoring.add_argument("url")
    monitoring.add_argument("--pool", action="append", default=[])
    monitoring.add_argument("--group", action="append", default=[])
    options = parser.parse_args(arguments)
    try:
        if options.chart == "cluster":
            token = os.environ.get(TOKEN_ENV, "")
            say(check_cluster(options.url, options.ray_version, options.nodes, token))
        else:
            say(check_monitoring(options.url, options.pool, options.group))
    except SdpError as error:
        say(str(error), level="error")
    except (OSError, ValueError, KeyError, TypeError) as error:  # no answer, or none of Ray's or Prometheus's
        say(
            f"{options.url}: {one_line(error) or type(error).__name__}; check that it runs and may be reached",
            level="error",
        )
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
