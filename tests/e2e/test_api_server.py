"""An API server with KubeRay's CRDs accepts everything that the project generates, in strict mode."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.sdp_cluster import VALUES, helm_template
from tests.e2e import jobs
from tests.e2e.kube import Failed, Kube

STRICT = ("create", "--dry-run=server", "--validate=strict", "-f")


@pytest.mark.parametrize("example", sorted(VALUES))
def test_rendered_values_are_accepted_by_the_api_server(kube: Kube, tool: Callable[[str], Path], example: str) -> None:
    rendered = helm_template(tool("helm"), example, "nameOverride=example", "serviceAccount.name=")
    assert rendered.returncode == 0, rendered.stderr
    result = kube.run(*STRICT, "-", stdin=rendered.stdout)
    assert "raycluster.ray.io/example created (server dry run)" in result


@pytest.mark.parametrize("path", sorted((jobs.ROOT / "manifests").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_manifest_is_one_that_the_api_server_takes(kube: Kube, path: Path) -> None:
    assert "created (server dry run)" in kube.run(*STRICT, str(path))


def test_a_field_that_kuberay_does_not_know_would_be_refused(kube: Kube) -> None:
    text = (jobs.ROOT / "manifests" / "download.yaml").read_text()
    with pytest.raises(Failed, match="submissionMod"):
        kube.run(*STRICT, "-", stdin=text.replace("submissionMode", "submissionMod"))
