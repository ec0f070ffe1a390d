"""Would a pod ever schedule: selectors, affinity, taints, resources, and how many fit."""

from decimal import Decimal
from typing import Any

import pytest

from sdp.kube.placing import obstacles, place, requests
from sdp.kube.quantity import parse, shown
from tests.kube_server import node

A100 = "NVIDIA-A100-SXM4-80GB"


def pod(cpu: str = "1", **spec: Any) -> dict[str, Any]:
    return {"containers": [{"resources": {"requests": {"cpu": cpu}}}], **spec}


def affinity(*expressions: dict[str, Any]) -> dict[str, Any]:
    terms = [{"matchExpressions": [expression]} for expression in expressions]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
ZONE = {"key": "zone", "operator": "In", "values": ["a", "b"]}
NODE = {
    "metadata": {"name": "n", "labels": {"zone": "a", "size": "8", "nvidia.com/gpu.product": A100}},
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
            pod(),
            {
                **NODE,
                "spec": {
                    "unschedulable": True,
                    "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
                },
            },
            ["is cordoned"],
        ),
        (
            pod(),
            {**NODE, "status": {**NODE["status"], "conditions": [{"type": "Ready", "status": "Unknown"}]}},  # type: ignore[dict-item]
            ["is not ready"],
        ),
        (pod(affinity=affinity(ZONE)), NODE, []),
        (pod(affinity=affinity({**ZONE, "operator": "NotIn"})), NODE, ["does not match the node affinity"]),
        (
            pod(affinity=affinity({**ZONE, "operator": "NotIn"}, {"key": "size", "operator": "Gt", "values": ["4"]})),
            NODE,
            [],
        ),
        (
            pod(affinity=affinity({"key": "size", "operator": "Lt", "values": ["8"]})),
            NODE,
            ["does not match the node affinity"],
        ),
        (pod(affinity=affinity({"key": "rack", "operator": "DoesNotExist"})), NODE, []),
        (pod(affinity=affinity({"key": "rack", "operator": "Exists"})), NODE, ["does not match the node affinity"]),
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
def test_a_pod_fits_a_node_as_the_scheduler_would_have_it(spec: Any, where: Any, says: list[str]) -> None:
    assert list(obstacles(spec, requests(spec), where)) == says


def test_an_affinity_term_without_anything_in_it_matches_no_node() -> None:
    nothing = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}}
    assert place(pod(affinity=nothing), [NODE]).nodes == ()


def test_all_expressions_of_a_term_have_to_hold_and_one_of_the_terms() -> None:
    no = {"key": "zone", "operator": "In", "values": ["z"]}
    both = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [ZONE, no]}]}
        }
    }
    assert place(pod(affinity=both), [NODE]).nodes == ()
    assert place(pod(affinity=affinity(ZONE, no)), [NODE]).nodes == ("n",)


def test_room_is_what_the_scarcest_resource_allows_summed_over_nodes() -> None:
    nodes = [node("x", 1), node("y", 8), node("z", 0)]
    spec = {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "1", "cpu": "3"}}}]}
    fit = place(spec, nodes)
    assert fit.nodes == ("x", "y")
    assert fit.room == 1 + 2
    assert fit.reasons == {"has 0 of nvidia.com/gpu, needed 1": 1}


def test_reasons_are_told_with_how_many_nodes_they_are_about_the_most_frequent_first() -> None:
    nodes = [node("a", 1, "NVIDIA-A10G"), node("b", 1, "NVIDIA-A10G"), node("c")]
    spec = {"containers": [{"resources": {"requests": {"cpu": "1"}}}], "nodeSelector": {"nvidia.com/gpu.product": A100}}
    assert place(spec, nodes).why_not() == (
        f"2 nodes: has nvidia.com/gpu.product=NVIDIA-A10G, not {A100}; 1 node: lacks nvidia.com/gpu.product={A100}"
    )


def test_a_pod_asks_for_its_containers_together_or_for_its_greediest_first_step() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "4", "memory": "1Gi"}}},
            {"resources": {"requests": {"cpu": "500m"}}},
        ],
        "initContainers": [
            {"resources": {"requests": {"cpu": "1"}}, "restartPolicy": "Always"},
            {"resources": {"requests": {"cpu": "3", "memory": "512Mi"}}},
        ],
        "overhead": {"cpu": "250m"},
    }
    assert requests(spec) == {"cpu": Decimal("4.25"), "memory": Decimal(2**30)}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # Of Kubernetes' documentation: these are roughly the same.
        ("128974848", "128974848"),
        ("129e6", "129000000"),
        ("129M", "129000000"),
        ("128974848000m", "128974848"),
        ("123Mi", "128974848"),
        ("0.5", "0.5"),
        ("100m", "0.1"),
        ("1Ki", "1024"),
        ("2k", "2000"),
        ("1E", "1000000000000000000"),
        ("1.5Gi", "1610612736"),
        (8, "8"),
        ("50u", "0.00005"),
    ],
)
def test_a_quantity_is_read_as_kubernetes_does(text: str | int, number: str) -> None:
    assert parse(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "1K", "1ki", "Gi", "1 Gi x", "1mi", "--1", "1e"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_amounts_are_shown_for_people() -> None:
    assert shown(Decimal("8053063680"), "requests.memory") == "7.5Gi"
    assert shown(Decimal("7.91"), "cpu") == "7.91"
