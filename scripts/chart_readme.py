"""Write each chart's README.md from the comments in its values.yaml: `python -m scripts.chart_readme`.

A comment that begins with `# --` documents the key below it.
"""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHARTS = Path(__file__).resolve().parent.parent / "charts"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_-]+):")

_TABLE = """
| Value | Default | Description |
|---|---|---|
"""

HEADS = {
    "sdp-cluster": """# sdp-cluster

Install this chart to run sdp's jobs on Kubernetes. It creates a Ray cluster with several kinds of nodes and configures
its jobs. It needs the KubeRay operator 1.7 or later.

```sh
helm install sdp charts/sdp-cluster -f values.yaml
kubectl apply -f manifests/download.yaml
```

`values.yaml` must set at least:

- `image.repository`;
- `storage.uri`, and access to it by `serviceAccount.annotations` or `storage.secretName`;
- `model`;
- `jobs.download.source`.

[docs/kubernetes.md](../../docs/kubernetes.md) begins with an example. `examples/` has values for PRX, for spot nodes
with on-demand fallback, for a cluster without GPUs, for EFA, and for [GKE](../../docs/gke.md),
[AKS](../../docs/aks.md) and [OpenShift](../../docs/openshift.md). `sdp doctor` checks the release.

Values that cannot work are refused before anything is applied, with the path of the value:

- values.schema.json refuses wrong types, values out of range and typos, in the keys of `jobs` too. Fractions need
  `--set-json` or a values file, since `--set` makes text of them.
- The templates refuse minReplicas above maxReplicas, GPUs without an accelerator, and jobs with an accelerator that no
  group has. `sdp doctor --manifest` says whether the groups have enough of them.
- The chart's own labels and annotations win over yours.

Remove a worker group with `--set groups.NAME=null`; add one by adding a key.
""",
    "sdp-monitoring": """# sdp-monitoring

Install this chart to monitor sdp on Kubernetes with Prometheus and Grafana. It provides a GPU exporter on each node
with GPUs, scraping of Ray's pods, recording rules, alerts with [runbooks](../../docs/runbooks) and
[dashboards](../../docs/monitoring.md). It works with an unmodified kube-prometheus-stack or with your own Prometheus.

```sh
CHARTS=oci://ghcr.io/prometheus-community/charts
helm install kube-prometheus-stack $CHARTS/kube-prometheus-stack -n monitoring --create-namespace
helm install sdp-monitoring charts/sdp-monitoring -n monitoring --set exporter.image.repository=REGISTRY/sdp/exporter
```

- If kube-prometheus-stack has another release name: `--set monitorLabels.release=NAME`.
- Without the Prometheus Operator: `--set mode=plain`; see
  [docs/monitoring.md](../../docs/monitoring.md#without-the-operator).

The exporter needs the host's pids (`hostPID`), because NVIDIA's driver uses no others. Its namespace must allow that
(pod-security.kubernetes.io/enforce: privileged). It has no other privilege: no root, no capability, no mount from the
host. With the host's pids a process can read the environment, secrets included, of every process of its own user on
the node. So the exporter runs as its own user (9850), and learns only the pod's uid of other processes. A network
policy admits only `exporter.networkPolicy.monitoringNamespaces`.
""",
}


def documented(text: str) -> list[tuple[str, str]]:
    """Return the dotted path and description of each documented key, in order."""
    entries, path, words = [], list[tuple[int, str]](), list[str]()
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            words = [stripped.removeprefix("# --").strip()]
            continue
        match = _KEY.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        path = [(i, key) for i, key in path if i < indent] + [(indent, match["key"])]
        if words:
            entries.append((".".join(key for _, key in path), words[0]))
            words = []
    return entries


def page(text: str, head: str) -> str:
    """Return the README of a chart with these values."""
    values = yaml.safe_load(text)
    rows = [f"| `{path}` | {_default(_at(values, path))} | {words} |" for path, words in documented(text)]
    return head + _TABLE + "\n".join(rows) + "\n"


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def _default(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "…" if len(str(value)) > 60 else f"`{value}`"
    return (
        "empty" if value in ("", [], {}) else f"`{'null' if value is None else str(value)}`".replace("`True`", "`true`")
    )


def main() -> int:
    for name, head in HEADS.items():
        text = (CHARTS / name / "values.yaml").read_text(encoding="utf-8")
        (CHARTS / name / "README.md").write_text(page(text, head), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
