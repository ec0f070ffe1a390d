"""Writes charts/sdp-cluster/README.md from the comments in its values.yaml: `python -m scripts.chart_readme`.

A comment that begins with `# --` documents the key below it.
"""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "sdp-cluster"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_-]+):")

HEAD = """# sdp-cluster

A Ray cluster of unlike nodes, and the configuration of its jobs. Needs the KubeRay operator 1.7 or later.

```sh
helm install sdp charts/sdp-cluster --set storage.uri=s3://BUCKET/FOLDER --set model=s3://BUCKET/stable-diffusion-2-base
kubectl create -f manifests/download.yaml
```

What cannot work is refused before anything is applied, with the path of the value: by values.schema.json (types, typos,
an accelerator that is not in the catalogue) and by the templates (fewest above most, GPUs without an accelerator).
`examples/` has values for spot nodes with on-demand fallback, for a cluster without GPUs, and for EFA.

Take a worker group out with `--set groups.NAME=null`; add one by adding a key.

| Value | Default | What it is for |
|---|---|---|
"""


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


def page(text: str) -> str:
    values = yaml.safe_load(text)
    rows = [f"| `{path}` | {_default(_at(values, path))} | {words} |" for path, words in documented(text)]
    return HEAD + "\n".join(rows) + "\n"


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
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    (CHART / "README.md").write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
