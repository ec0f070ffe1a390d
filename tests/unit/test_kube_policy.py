"""Whether a NetworkPolicy lets KubeRay's operator in, by Kubernetes' rules of peers and ports."""

from dataclasses import replace
from typing import Any

import pytest

from sdp.kube.check_policy import Caller, admits

NAME = "kubernetes.io/metadata.name"
OPERATOR = Caller({"app.kubernetes.io/name": "kuberay-operator"}, "kuberay-system", {NAME: "kuberay-system"})
IN_SYSTEM = {"namespaceSelector": {"matchLabels": {NAME: "kuberay-system"}}}
ITS_POD = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
JOB_API = {"port": 8265, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("rule", "let_in"),
    [
        ({"from": [IN_SYSTEM], "ports": [JOB_API]}, True),
        ({"from": [{"namespaceSelector": {"matchLabels": {NAME: "default"}}}], "ports": [JOB_API]}, False),
        ({"from": [{**IN_SYSTEM, **ITS_POD}], "ports": [JOB_API]}, True),
        ({"from": [{**IN_SYSTEM, "podSelector": {"matchLabels": {"app": "other"}}}], "ports": [JOB_API]}, False),
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
    assert admits({"spec": {"ingress": [rule]}}, OPERATOR, 8265, "lab") is let_in
    assert not admits({"spec": {}}, OPERATOR, 8265, "lab")


def test_a_caller_of_any_labels_is_told_from_one_of_another_namespace() -> None:
    other_pod = {"from": [{**IN_SYSTEM, "podSelector": {"matchLabels": {"app": "other"}}}]}
    policy = {"spec": {"ingress": [other_pod]}}
    assert admits(policy, replace(OPERATOR, labels=None), 8265, "lab")
    assert not admits(policy, replace(OPERATOR, labels=None, namespace_labels={NAME: "x"}), 8265, "lab")


def test_a_peer_without_a_namespace_is_one_of_the_policy_s_own() -> None:
    assert admits({"spec": {"ingress": [{"from": [ITS_POD]}]}}, OPERATOR, 8265, "kuberay-system")
