"""A NetworkPolicy admits KubeRay's operator or not, by Kubernetes' rules for peers and ports."""

from typing import Any

import pytest

from sdp.kube.check_network import admits, selects

NAME = "kubernetes.io/metadata.name"
OPERATOR = {NAME: "kuberay-system"}
"""The labels of the namespace where it is."""
IN_SYSTEM = {"namespaceSelector": {"matchLabels": {NAME: "kuberay-system"}}}
ITS_POD = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
JOB_API = {"port": 8265, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("rule", "let_in"),
    [
        ({"from": [IN_SYSTEM], "ports": [JOB_API]}, True),
        ({"from": [{"namespaceSelector": {"matchLabels": {NAME: "default"}}}], "ports": [JOB_API]}, False),
        ({"from": [{**IN_SYSTEM, **ITS_POD}], "ports": [JOB_API]}, True),
        ({"from": [ITS_POD], "ports": [JOB_API]}, False),  # of the policy's own namespace, which is another
        ({"from": [{"namespaceSelector": {}}]}, True),
        ({"from": [IN_SYSTEM], "ports": [{"port": 8080}]}, False),
        ({"from": [IN_SYSTEM], "ports": [{"port": 8000, "endPort": 9000}]}, True),
        ({"from": [IN_SYSTEM], "ports": [{"port": 8265, "protocol": "UDP"}]}, False),
        ({"ports": [JOB_API]}, True),
        ({}, True),
        (
            {"from": [{"namespaceSelector": {"matchExpressions": [{"key": NAME, "operator": "In", "values": ["a"]}]}}]},
            False,
        ),
    ],
)
def test_the_operator_is_let_in_by_the_rules_of_kubernetes(rule: dict[str, Any], let_in: bool) -> None:
    assert admits({"spec": {"ingress": [rule]}}, OPERATOR, "lab") is let_in
    assert not admits({"spec": {}}, OPERATOR, "lab")


def test_a_peer_without_a_namespace_is_one_of_the_policy_s_own() -> None:
    assert admits({"spec": {"ingress": [{"from": [ITS_POD]}]}}, OPERATOR, "kuberay-system")


@pytest.mark.parametrize(
    ("operator", "values", "selected"),
    [
        ("In", ["a", "b"], True),
        ("In", ["c"], False),
        ("NotIn", ["a"], False),
        ("NotIn", ["c"], True),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_expressions_of_a_selector_hold_as_kubernetes_says(operator: str, values: list[str], selected: bool) -> None:
    selector = {
        "matchLabels": {"x": "y"},
        "matchExpressions": [{"key": "zone", "operator": operator, "values": values}],
    }
    assert selects(selector, {"zone": "a", "x": "y"}) is selected
    assert not selects(selector, {"zone": "a"})
