"""Has Prometheus loaded the release's scrape jobs and rules, and does it reach the targets?

Run by `helm test` with Prometheus's URL and --pool=NAME and --group=NAME, in a pod that has no rights in Kubernetes.
"""

import json
import sys
import urllib.request

url, *words = sys.argv[1:]
pools = {word.removeprefix("--pool=") for word in words if word.startswith("--pool=")}
groups = {word.removeprefix("--group=") for word in words if word.startswith("--group=")}


def ask(path):
    with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=20) as response:
        return json.load(response)["data"]


try:
    if missing := sorted(pools - set(ask("scrape_pools")["scrapePools"])):
        sys.exit(
            f"{url}: no scrape job {', '.join(missing)}; Prometheus takes a minute to load them, and selects "
            "PodMonitors by their labels (monitorLabels)"
        )
    if missing := sorted(groups - {group["name"] for group in ask("rules")["groups"]}):
        sys.exit(f"{url}: no rules {', '.join(missing)}; Prometheus selects them by their labels (monitorLabels)")
    targets = [target for target in ask("targets?state=active")["activeTargets"] if target["scrapePool"] in pools]
    for target in targets:
        if target["health"] == "down":
            sys.exit(f"{target['scrapeUrl']}: Prometheus cannot scrape it: {target['lastError']}")
except (OSError, ValueError, KeyError, TypeError) as error:
    sys.exit(f"{url}: {error or type(error).__name__}; check that it runs and may be reached")
print(f"Prometheus has {len(pools)} scrape jobs of this release with {len(targets)} targets, none of them down")
