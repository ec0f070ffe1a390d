"""What an API server with KubeRay's own CRDs says to everything that we hand out: strictly, every field."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import jobs
from tests.e2e.kube import Failed, Kube

CHART = jobs.ROOT / "charts" / "sdp-cluster"
STRICT = ("create", "--dry-run=server", "--validate=strict", "-f")


@pytest.mark.parametrize("example", sorted(path.stem for path in (CHART / "examples").glob("*.yaml")))
def test_an_example_renders_to_what_the_api_server_takes(kube: Kube, tool: Callable[[str], Path], example: str) -> None:
    values = CHART / "examples" / f"{example}.yaml"
    command = [str(tool("helm")), "template", "example", str(CHART), "-f", str(values)]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    told = kube.run(*STRICT, "-", given=rendered)
    assert "raycluster.ray.io/example created (server dry run)" in told


@pytest.mark.parametrize("path", sorted((jobs.ROOT / "manifests").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_manifest_is_one_that_the_api_server_takes(kube: Kube, path: Path) -> None:
    assert "created (server dry run)" in kube.run(*STRICT, str(path))


def test_a_field_that_kuberay_does_not_know_would_be_refused(kube: Kube) -> None:
    text = (jobs.ROOT / "manifests" / "download.yaml").read_text()
    with pytest.raises(Failed, match="submissionMod"):
        kube.run(*STRICT, "-", given=text.replace("submissionMode", "submissionMod"))
