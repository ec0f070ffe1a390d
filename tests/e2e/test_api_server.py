"""An API server with KubeRay's CRDs accepts everything that the project generates, in strict mode."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.contract.sdp_cluster import VALUES, helm_template
from tests.e2e import jobs
from tests.e2e.kube import Failed, Kube
from tests.programs import ended

STRICT = ("create", "--dry-run=server", "--validate=strict", "-f")
FOLDER = jobs.ROOT / "manifests"
MANIFESTS = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "kustomization.yaml"})


@pytest.mark.parametrize("example", sorted(VALUES))
def test_rendered_values_are_accepted_by_the_api_server(kube: Kube, tool: Callable[[str], Path], example: str) -> None:
    rendered = helm_template(tool("helm"), example, "nameOverride=example", "serviceAccount.name=")
    assert rendered.returncode == 0, rendered.stderr
    result = kube.run(*STRICT, "-", stdin=rendered.stdout)
    assert "raycluster.ray.io/example created (server dry run)" in result


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_one_that_the_api_server_takes(kube: Kube, path: Path) -> None:
    assert "created (server dry run)" in kube.run(*STRICT, str(path))


def test_the_whole_pipeline_is_taken_at_once(kube: Kube) -> None:
    result = kube.run(*STRICT[:-1], "-k", str(FOLDER))
    assert result.count("created (server dry run)") == 3


def test_the_namespace_refuses_a_pod_beyond_the_restricted_standard(kube: Kube, tool: Callable[[str], Path]) -> None:
    """All other pods of these tests run in the same namespace."""
    rendered = yaml.safe_load_all(helm_template(tool("helm"), "minimal").stdout)
    (spec,) = (manifest["spec"] for manifest in rendered if manifest and manifest["kind"] == "RayCluster")
    pod = {"apiVersion": "v1", "kind": "Pod", **spec["headGroupSpec"]["template"]}
    pod["metadata"] = {"name": "beyond"}
    pod["spec"].pop("serviceAccountName", None)  # it is not made there
    kube.run(*STRICT, "-", stdin=json.dumps(pod))
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(Failed, match="restricted"):
        kube.run(*STRICT, "-", stdin=json.dumps(pod))


def test_a_field_that_kuberay_does_not_know_would_be_refused(kube: Kube) -> None:
    text = (FOLDER / "download.yaml").read_text()
    with pytest.raises(Failed, match="submissionMod"):
        kube.run(*STRICT, "-", stdin=text.replace("submissionMode", "submissionMod"))


def test_accounts_that_the_chart_should_not_make_must_exist(kube: Kube, tool: Callable[[str], Path]) -> None:
    """Without them KubeRay makes neither pods nor a token, and cannot delete RayJobs."""
    create = [tool("helm"), "install", "sdp", jobs.ROOT / "charts/sdp-cluster", "--dry-run=server"]
    values = "image.repository=r,storage.uri=s3://my-bucket/f,serviceAccount.create=false,serviceAccount.name=mine"
    done = ended([*create, "-n", kube.namespace, "--set", values])
    assert f"namespace {kube.namespace} lacks mine, mine-head, mine-downloads" in done.stderr
