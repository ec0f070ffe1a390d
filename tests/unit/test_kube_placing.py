"""The fit of pods on nodes: selectors, taints, resources, and their number."""

from decimal import Decimal
from typing import Any

import pytest

from sdp.errors import UserError
from sdp.kube.placing import place, requests
from tests.kube_server import node

A100 = "NVIDIA-A100-SXM4-80GB"


def pod(cpu: str = "1", **spec: Any) -> dict[str, Any]:
    return {"containers": [{"resources": {"requests": {"cpu": cpu}}}], **spec}


TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
NODE = {
    "metadata": {"name": "n", "labels": {"zone": "a", "nvidia.com/gpu.product": A100}},
    "spec": {},
    "status": {"allocatable": {"cpu": "7910m", "memory": "30Gi", "nvidia.com/gpu": "8"}},
}
TAINTED = {**NODE, "spec": {"taints": [TAINT]}}


@pytest.mark.parametrize(
    ("spec", "where", "says"),
    [
        (pod(), NODE, []),
        (pod("8"), NODE, ["has 7.91 of cpu, needed 8"]),
        (pod("7910m"), NODE, []),
        (pod(nodeSelector={"zone": "a"}), NODE, []),
        (pod(nodeSelector={"zone": "b"}), NODE, ["has zone=a, not b"]),
        (pod(nodeSelector={"rack": "1"}), NODE, ["lacks rack=1"]),
        (pod(), TAINTED, ["has the taint nvidia.com/gpu=present:NoSchedule"]),
        (pod(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}]), TAINTED, []),
        (pod(tolerations=[{"operator": "Exists"}]), TAINTED, []),
        (pod(tolerations=[{"key": "nvidia.com/gpu", "value": "present"}]), TAINTED, []),
        (
            pod(tolerations=[{"key": "nvidia.com/gpu", "value": "other"}]),
            TAINTED,
            ["has the taint nvidia.com/gpu=present:NoSchedule"],
        ),
        (
            pod(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}]),
            TAINTED,
            ["has the taint nvidia.com/gpu=present:NoSchedule"],
        ),
        (pod(), {**NODE, "spec": {"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}}, []),
        (pod(), {**NODE, "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}}, ["has the taint k:NoExecute"]),
        (
            {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 9}}}]},
            NODE,
            ["has 8 of nvidia.com/gpu, needed 9"],
        ),
        (
            {"containers": [{"resources": {"requests": {"vpc.amazonaws.com/efa": 4}}}]},
            NODE,
            ["has 0 of vpc.amazonaws.com/efa, needed 4"],
        ),
        ({"containers": [{"resources": {"requests": {"memory": "40Gi"}}}]}, NODE, ["has 30Gi of memory, needed 40Gi"]),
    ],
)
def test_a_pod_fits_a_node_by_labels_taints_and_allocatable_resources(spec: Any, where: Any, says: list[str]) -> None:
    fit = place(spec, [where])
    assert fit.reasons == ({", ".join(says): 1} if says else {})
    assert fit.nodes == (() if says else ("n",))


def test_capacity_is_limited_by_the_scarcest_resource_and_summed_over_nodes() -> None:
    nodes = [node("x", 1), node("y", 8), node("z", 0)]
    spec = {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "1", "cpu": "3"}}}]}
    fit = place(spec, nodes)
    assert fit.nodes == ("x", "y")
    assert fit.room == 1 + 2
    assert fit.reasons == {"has 0 of nvidia.com/gpu, needed 1": 1}


def test_reasons_are_listed_with_their_number_of_nodes_the_most_frequent_first() -> None:
    nodes = [node("a", 1, "NVIDIA-A10G"), node("b", 1, "NVIDIA-A10G"), node("c")]
    spec = {"containers": [{"resources": {"requests": {"cpu": "1"}}}], "nodeSelector": {"nvidia.com/gpu.product": A100}}
    assert place(spec, nodes).why_not() == (
        f"2 nodes: has nvidia.com/gpu.product=NVIDIA-A10G, not {A100}; 1 node: lacks nvidia.com/gpu.product={A100}"
    )


def test_a_pod_asks_for_its_containers_together_and_a_limit_is_a_request() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "4", "memory": "1Gi"}}},
            {"resources": {"requests": {"cpu": "500m"}}},
        ],
    }
    assert requests(spec) == {"cpu": Decimal("1.5"), "memory": Decimal(2**30)}


def test_a_malformed_quantity_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="resources: expected Kubernetes quantities, got"):
        requests({"containers": [{"resources": {"requests": {"cpu": "lots"}}}]})
