"""manifests/ and `sdp submit` make the same objects, and KubeRay 1.7 takes them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sdp.cli import JOBS
from sdp.kube.rayjob import make_rayjob
from sdp.kube.submit import Submission

MANIFESTS = Path(__file__).parents[2] / "manifests"
FILES = sorted(set(MANIFESTS.glob("*.yaml")) - {MANIFESTS / "kustomization.yaml"})
OF_JOBS = [path for path in FILES if not path.stem.endswith("-own-cluster")]
"""Those that run a job by the cluster's configuration of that name."""


def parsed(rayjob: dict[str, Any]) -> dict[str, Any]:
    """With the YAML in the YAML read, too: how it is laid out does not matter."""
    spec = rayjob["spec"]
    return {**rayjob, "spec": {**spec, "runtimeEnvYAML": yaml.safe_load(spec["runtimeEnvYAML"])}}


def test_the_stages_have_manifests_and_so_has_each_job_of_the_chart() -> None:
    of_chart = yaml.safe_load((MANIFESTS.parent / "charts" / "sdp-cluster" / "values.yaml").read_text())["jobs"]
    assert {path.stem for path in OF_JOBS} == {*JOBS, *of_chart}
    assert "train-online" in of_chart


@pytest.mark.parametrize("path", OF_JOBS, ids=lambda path: path.stem)
def test_submit_creates_the_same_job_as_the_manifest(path: Path) -> None:
    submission = Submission(job=path.stem, name=f"sdp-{path.stem}")
    assert parsed(make_rayjob(submission)) == parsed(yaml.safe_load(path.read_text()))


def test_applied_together_the_stages_after_download_wait_for_the_dataset_that_they_read() -> None:
    folder = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    assert folder["resources"] == ["download.yaml", "process.yaml", "train.yaml"]
    entrypoints = {patch["target"]["name"]: yaml.safe_load(patch["patch"])[0]["value"] for patch in folder["patches"]}
    for stage in ("process", "train"):
        alone = yaml.safe_load((MANIFESTS / f"{stage}.yaml").read_text())
        module, rest = "python -m sdp.supervisor ", f"{stage} --config /etc/sdp/jobs/{stage}.yaml"
        assert alone["spec"]["entrypoint"] == module + rest
        assert entrypoints[alone["metadata"]["name"]] == f"{module}--wait-for-input {rest}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kuberay_takes_the_manifest(path: Path) -> None:
    """By ValidateRayJobSpec of KubeRay 1.7."""
    spec = yaml.safe_load(path.read_text())["spec"]
    if not spec.get("shutdownAfterJobFinishes"):
        assert not spec.get("ttlSecondsAfterFinished"), "refused without shutdownAfterJobFinishes"
        assert not spec.get("suspend"), "refused without shutdownAfterJobFinishes"
    if "clusterSelector" in spec:
        assert spec["clusterSelector"]["ray.io/cluster"]
        assert not spec.get("backoffLimit")
        assert not spec.get("suspend")
        assert spec["submissionMode"] != "SidecarMode"
    else:
        cluster = spec["rayClusterSpec"]
        assert not {"upgradeStrategy", "enableInTreeAutoscaling", "autoscalerOptions"} & cluster.keys()
        assert not any({"idleTimeoutSeconds", "priority"} & group.keys() for group in cluster["workerGroupSpecs"])
