"""The pages' commands for a cluster: their values render, and they agree with the charts."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import ended

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ROOT / "charts"
EKS = ROOT / "docs/eks.md"
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("kubernetes", "eks", "monitoring"))]


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


VALUES = [(page, block) for page in PAGES for block in blocks(page, "yaml") if re.match(r"image: {repository:", block)]


def on_eks(kind: str) -> Any:
    """Return the object of a kind on the page of EKS."""
    (text,) = (block for block in blocks(EKS, "yaml") if f"kind: {kind}" in block)
    return yaml.safe_load(text)


def values_of(name: str) -> str:
    """Return a page's values, with BUCKET and REGISTRY, which are the reader's own, in lower case."""
    (values,) = [values for page, values in VALUES if page.stem == name]
    return re.sub(r"\b[A-Z]{4,}\b", lambda place: place[0].lower(), values)


@pytest.mark.needs("helm")
@pytest.mark.parametrize("page", ["README", "kubernetes", "eks"])
def test_the_values_that_a_page_gives_render(page: str, tmp_path: Path, tool: Callable[[str], Path]) -> None:
    (tmp_path / "values.yaml").write_text(values_of(page))
    done = ended([tool("helm"), "template", "sdp", CHARTS / "sdp-cluster", "-f", tmp_path / "values.yaml"])
    assert done.returncode == 0, done.stderr
    assert "kind: RayCluster" in done.stdout


@pytest.mark.needs("helm")
def test_values_that_are_pasted_as_they_are_say_what_to_replace(tmp_path: Path, tool: Callable[[str], Path]) -> None:
    for page in PAGES[:2]:
        (tmp_path / "values.yaml").write_text(next(values for of, values in VALUES if of == page))
        done = ended([tool("helm"), "template", "sdp", CHARTS / "sdp-cluster", "-f", tmp_path / "values.yaml"])
        assert "values: replace REGISTRY, BUCKET, FOLDER with your own" in done.stderr


def test_the_pages_that_install_the_chart_give_its_values_install_the_operator_and_examine_it_first() -> None:
    assert {page.stem for page, _ in VALUES} == {"README", "kubernetes", "eks"}
    for page, _ in VALUES:
        commands = "".join(blocks(page, "sh"))
        order = [
            commands.index("helm install kuberay-operator "),
            commands.index("| sdp doctor --manifest -"),
            commands.index("helm install sdp charts/sdp-cluster"),
            commands.index(re.findall(r"apply -k manifests|apply -f manifests/download\.yaml", commands)[0]),
        ]
        assert order == sorted(order), page.name


def test_wherever_monitoring_is_installed_the_exporter_s_image_is_built_and_named() -> None:
    commands = {page.stem: "".join(blocks(page, "sh")).replace("\\\n", " ") for page in PAGES}
    installs = {name: re.findall("helm install sdp-monitoring.*", text) for name, text in commands.items()}
    assert {name for name, lines in installs.items() if lines} == {"eks", "monitoring"}
    for name in ("eks", "monitoring"):
        assert all("--set exporter.image.repository=" in line for line in installs[name]), name
        assert re.search(r"build_images\.sh \S+ .*exporter", commands[name]), name


def test_the_device_plugin_of_efa_is_made_to_bear_the_taint_that_the_nodes_have() -> None:
    groups = [group for group in on_eks("ClusterConfig")["managedNodeGroups"] if group.get("efaEnabled")]
    keys = {taint["key"] for group in groups for taint in group.get("taints", ())}
    (patch,) = re.findall(r"patch daemonset aws-efa\S+ --type json --patch '(.*?)'", EKS.read_text(), re.DOTALL)
    assert {operation["value"]["key"] for operation in yaml.safe_load(patch)} == keys == {"nvidia.com/gpu"}


def test_no_pod_reaches_the_metadata_service_of_its_node() -> None:
    """With its credentials it would have the node's role."""
    groups = on_eks("ClusterConfig")["managedNodeGroups"]
    assert [group["name"] for group in groups if not group.get("disablePodIMDS")] == []


def test_a_node_pool_keeps_nodes_with_work_on_them() -> None:
    pool = on_eks("NodePool")
    values = yaml.safe_load((CHARTS / "sdp-cluster" / "values.yaml").read_text())
    template = pool["spec"]["template"]
    assert pool["spec"]["disruption"]["consolidationPolicy"] == "WhenEmpty"
    assert template["spec"]["expireAfter"] == "Never"
    assert template["metadata"]["labels"] == {"nvidia.com/gpu.product": "NVIDIA-A10G"}
    assert "annotations" in values["groupDefaults"]
