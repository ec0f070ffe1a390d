"""An API server with KubeRay's CRDs accepts everything that the project generates, in strict mode."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.contract.sdp_cluster import VALUES, helm_template
from tests.e2e import jobs
from tests.e2e.kube import Failed, Kube

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


def test_every_pod_is_admitted_where_the_restricted_standard_is_enforced(
    kube: Kube, tool: Callable[[str], Path]
) -> None:
    """Pods of the cluster and of `helm test`; KubeRay's init container takes the security context of Ray's."""
    rendered = [manifest for manifest in yaml.safe_load_all(helm_template(tool("helm"), "minimal").stdout) if manifest]
    (spec,) = (manifest["spec"] for manifest in rendered if manifest["kind"] == "RayCluster")
    templates = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    pods = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]
    pods += [manifest for manifest in rendered if manifest["kind"] == "Pod"]
    restricted = Kube(f"{kube.namespace}-restricted")
    kube.run("create", "namespace", restricted.namespace)
    try:
        kube.run("label", "namespace", restricted.namespace, "pod-security.kubernetes.io/enforce=restricted")
        for number, pod in enumerate(pods):
            about = {**pod["metadata"], "name": f"pod-{number}"}
            pod["metadata"] = {name: value for name, value in about.items() if name != "namespace"}
            pod["spec"].pop("serviceAccountName", None)  # it is not made there
            restricted.run(*STRICT, "-", stdin=json.dumps(pod))
        pods[0]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
        with pytest.raises(Failed, match="restricted"):
            restricted.run(*STRICT, "-", stdin=json.dumps(pods[0]))
    finally:
        kube.run("delete", "namespace", restricted.namespace)


def test_a_field_that_kuberay_does_not_know_would_be_refused(kube: Kube) -> None:
    text = (FOLDER / "download.yaml").read_text()
    with pytest.raises(Failed, match="submissionMod"):
        kube.run(*STRICT, "-", stdin=text.replace("submissionMode", "submissionMod"))
