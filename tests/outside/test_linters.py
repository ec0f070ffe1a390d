"""Linters of others find nothing in the workflows and in all pods, except what is wrong here, with the reason.

kubeconform and promtool judge in tests/contract. kube-score is left out: it builds longer than a minute.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.contract.sdp_cluster import RENDERED, Manifest, parsed
from tests.monitoring import chart as monitoring
from tests.programs import ROOT, ended, printed

WRONG_HERE = {
    "CKV_K8S_8": "the kubelet cannot judge Ray; KubeRay adds probes to its containers",
    "CKV_K8S_9": "the same of readiness",
    "CKV_K8S_11": "a CPU limit throttles; memory has limits",
    "CKV_K8S_15": "a tag is a version and never moves; image.pullPolicy is the user's",
    "CKV_K8S_17": "the exporter finds the processes that use a GPU",
    "CKV_K8S_40": "1000 is the user of Ray's images, and files have its number",
    "CKV_K8S_43": "image.digest is the user's: the project has no image",
}
WRONG_FOR = {"CKV_K8S_17": {"sdp-exporter"}}
"""Findings that are wrong for some objects only."""


@pytest.mark.needs("actionlint")
def test_actionlint_finds_nothing_in_the_workflows(tool: Callable[[str], Path]) -> None:
    assert printed([tool("actionlint")], cwd=ROOT) == ""


@pytest.mark.needs("linters")
def test_zizmor_finds_nothing_in_the_workflows(tool: Callable[[str], Path]) -> None:
    command = [tool("linters").with_name("zizmor"), "--offline", "--quiet", ".github"]
    done = ended(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def objects(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield the objects of manifests with the pods that KubeRay makes of a template in place of its own kinds."""
    for manifest in manifests:
        spec = manifest["spec"].get("rayClusterSpec", manifest["spec"]) if "spec" in manifest else {}
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if "headGroupSpec" in spec else []
        for group in groups:
            template = group["template"]
            name = f"{manifest['metadata']['name']}-{group.get('groupName', 'head')}"
            labels = template.get("metadata", {}).get("labels", {}) | {"ray.io/cluster": manifest["metadata"]["name"]}
            metadata = {"name": name, "namespace": "sdp", "labels": labels}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        if not groups:
            yield manifest | {"metadata": manifest["metadata"] | {"namespace": "sdp"}}


@pytest.mark.needs("helm", "linters")
def test_checkov_finds_only_what_is_wrong_here(tool: Callable[[str], Path], tmp_path: Path) -> None:
    manifests = monitoring.rendered(tool("helm"))
    for path in (RENDERED["minimal"], ROOT / "manifests/train-online-own-cluster.yaml"):
        manifests += parsed(path.read_text())
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects(manifests)))
    options = ["-f", "all.yaml", "--framework", "kubernetes", "-o", "json", "--skip-download"]
    command = [tool("linters").with_name("checkov"), *options]
    env = {**os.environ, "PYTHONPATH": "", "LOG_LEVEL": "ERROR"}
    done = ended(command, cwd=tmp_path, env=env)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["resource_count"] > 20
    findings = {(f["check_id"], f["resource"].split(".")[-1]) for f in report["results"]["failed_checks"]}
    assert {check for check, _ in findings} == set(WRONG_HERE)
    assert [(c, name) for c, name in sorted(findings) if name not in WRONG_FOR.get(c, {name})] == []
