"""Writes each chart's README.md from the comments in its values.yaml: `python -m scripts.chart_readme`.

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
| Value | Default | What it is for |
|---|---|---|
"""

HEADS = {
    "sdp-cluster": """# sdp-cluster

A Ray cluster of unlike nodes, and the configuration of its jobs. Needs the KubeRay operator 1.7 or later.

```sh
helm install sdp charts/sdp-cluster -f values.yaml
kubectl apply -f manifests/download.yaml
```

The least that `values.yaml` has to say: `image.repository`, `storage.uri` and access to it (by
`serviceAccount.annotations` or `storage.secretName`), `model`, and `jobs.download.source`;
[docs/kubernetes.md](../../docs/kubernetes.md) begins with one.

What cannot work is refused before anything is applied, with the path of the value: by values.schema.json (types, typos,
those in the keys of `jobs`, too, an accelerator that is not in the catalogue) and by the templates (fewest above most,
GPUs without an accelerator, jobs that no group could ever serve, values that would say nothing beside others).
`examples/` has values for spot nodes with on-demand fallback, for a cluster without GPUs, and for EFA.

Take a worker group out with `--set groups.NAME=null`; add one by adding a key.
""",
    "sdp-monitoring": """# sdp-monitoring

What watches the platform: a GPU exporter on each node that has GPUs, the scraping of Ray's pods, recording rules,
alerts with [runbooks](../../docs/runbooks), and [dashboards](../../docs/monitoring.md) for Grafana. Works with
kube-prometheus-stack as it comes, or with a Prometheus of your own.

```sh
CHARTS=oci://ghcr.io/prometheus-community/charts
helm install kube-prometheus-stack $CHARTS/kube-prometheus-stack -n monitoring --create-namespace
helm install sdp-monitoring charts/sdp-monitoring -n monitoring --set exporter.image.repository=REGISTRY/exporter
```

Where kube-prometheus-stack has another release name, `--set monitorLabels.release=NAME`. Where there is no Prometheus
Operator, `--set mode=plain`: see [docs/monitoring.md](../../docs/monitoring.md#without-the-operator).

The exporter needs the host's pids (`hostPID`), since NVIDIA's driver knows no others; beyond that it has no privilege:
no root, no capability, nothing of the host mounted. Its namespace must allow `hostPID`
(pod-security.kubernetes.io/enforce: privileged). With the host's pids a process can read the environment, secrets
included, of every process of its own user on the node, so the exporter runs as a user of its own (9850) and learns of
other processes only their pod's uid. A network policy lets only `exporter.networkPolicy.monitoringNamespaces` reach it.
""",
}


def documented(text: str) -> list[tuple[str, str]]:
    """Dotted path and words of each key that has a comment of its own, in order."""
    found, path, words = [], list[tuple[int, str]](), list[str]()
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
            found.append((".".join(key for _, key in path), words[0]))
            words = []
    return found


def page(text: str, head: str = HEADS["sdp-cluster"]) -> str:
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
