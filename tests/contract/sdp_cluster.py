"""charts/sdp-cluster as helm renders it, with each of the values files that tests render it with.

`python -m tests.contract.sdp_cluster` writes the renderings in tests/contract/rendered, which a reviewer reads, and the
manifests of jobs with a cluster of their own.
"""

import re
import subprocess
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sdp.kube.clusters import release_in
from sdp.kube.rayjob import as_yaml
from sdp.kube.submit import Submission, rayjob_of
from tests.programs import ended

CHART = Path(__file__).parents[2] / "charts" / "sdp-cluster"
VALUES = {
    path.stem: path
    for folder in (CHART / "examples", Path(__file__).parent / "values")
    for path in sorted(folder.glob("*.yaml"))
} | {"e2e": Path(__file__).parents[1] / "e2e" / "values.yaml"}

Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]
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
    return ended(command)


def parsed(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, Strict) if manifest]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    (match,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return match


def pods(cluster: Manifest) -> dict[str, Manifest]:
    """The pod templates by group."""
    workers = {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}
    return {"head": cluster["spec"]["headGroupSpec"]["template"], **workers}


RENDERED = {example: Path(__file__).parent / "rendered" / f"{example}.yaml" for example in ("minimal", "efa", "full")}
"""All defaults, the values of EFA over them, and every value that there is."""


def rendered(helm: Path, example: str) -> str:
    """Return an example's manifests, of which neither order nor layout depends on helm."""
    done = helm_template(helm, example)
    assert done.returncode == 0, done.stderr
    return yaml.safe_dump_all(parsed(done.stdout), width=120)


MANIFESTS = CHART.parents[1] / "manifests"
OWN_CLUSTER = ("process", "train", "train-online")
"""Jobs that have a manifest with a cluster of its own."""
_ABOUT = """\
# Run {job} on a cluster that is made for the job and deleted after it, with the chart's default values. With yours:
# helm template sdp charts/sdp-cluster -f values.yaml > all.yaml
# sdp submit {job} --own-cluster --manifest all.yaml | kubectl create -f -
# The job uses the configuration, accounts and network policies of the release sdp. As it is, with your image in it:
# kubectl apply -f manifests/{job}-own-cluster.yaml
"""


def own_cluster(helm: Path, job: str, *settings: str, example: str = "minimal") -> Manifest:
    """Return the RayJob that `sdp submit JOB --own-cluster` makes of a rendered release."""
    manifests = parsed(helm_template(helm, example, "model=s3://my-bucket/model", *settings).stdout)
    submission = Submission(job=job, name=f"sdp-{job}-own-cluster", own_cluster=True)
    return rayjob_of(submission, lambda: release_in(manifests, None), print)


def manifest_of(helm: Path, job: str) -> str:
    """Return the text of manifests/JOB-own-cluster.yaml."""
    return _ABOUT.format(job=job) + as_yaml(own_cluster(helm, job, "image.repository=REGISTRY/sdp/ray"))


if __name__ == "__main__":
    from scripts.tools import find

    helm = find("helm")
    assert helm is not None, "python -m scripts.tools fetch helm"
    for example, path in RENDERED.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendered(helm, example))
    for job in OWN_CLUSTER:
        (MANIFESTS / f"{job}-own-cluster.yaml").write_text(manifest_of(helm, job))
