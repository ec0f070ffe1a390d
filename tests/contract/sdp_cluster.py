"""charts/sdp-cluster as helm renders it, with each of the values files that tests render it with.

`python -m tests.contract.sdp_cluster` writes the renderings in tests/contract/rendered, which a reviewer reads.
"""

import re
import subprocess
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "sdp-cluster"
VALUES = {
    path.stem: path
    for folder in (CHART / "examples", Path(__file__).parent / "values")
    for path in sorted(folder.glob("*.yaml"))
} | {"e2e": Path(__file__).parents[1] / "e2e" / "values.yaml"}

Manifest = dict[str, Any]
FRACTION = re.compile(r"[^=]+=[0-9]+\.[0-9]+")


class Strict(yaml.SafeLoader):
    """Refuses repeated keys, of which other loaders silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({key for key in keys if keys.count(key) > 1} - {"<<"}):
            raise yaml.MarkedYAMLError(problem=f"twice: {', '.join(twice)}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


@cache
def helm_template(
    helm: Path, example: str, *settings: str, under: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Render an example with settings, over another values file; `--set` would make text of a fraction."""
    arguments = [part for one in settings for part in ("--set-json" if FRACTION.fullmatch(one) else "--set", one)]
    if example == "e2e":  # which names the image that it has built
        arguments = ["--set", "image.repository=registry.example.com/sdp/ray", *arguments]
    files = [part for file in (under, VALUES[example]) if file for part in ("-f", str(file))]
    command = [str(helm), "template", "sdp", str(CHART), *files, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def parsed(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, Strict) if manifest]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    (match,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return match


def pods(cluster: Manifest) -> dict[str, Manifest]:
    """The pod templates by group."""
    spec = cluster["spec"]
    return {
        "head": spec["headGroupSpec"]["template"],
        **{group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]},
    }


RENDERED = {example: Path(__file__).parent / "rendered" / f"{example}.yaml" for example in ("minimal", "efa", "full")}
"""All defaults, the values of EFA over them, and every value that there is."""


def rendered(helm: Path, example: str) -> str:
    """Return an example's manifests, of which neither order nor layout depends on helm."""
    done = helm_template(helm, example)
    assert done.returncode == 0, done.stderr
    return yaml.safe_dump_all(parsed(done.stdout), width=120)


if __name__ == "__main__":
    from scripts.tools import find

    helm = find("helm")
    assert helm is not None, "python -m scripts.tools fetch helm"
    for example, path in RENDERED.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendered(helm, example))
