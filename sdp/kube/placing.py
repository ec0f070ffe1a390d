"""Nodes that fit a group's pods, by node selector, taints and allocatable resources.

This works before pods exist, as in groups that start with none. The scheduler itself reports other obstacles (affinity,
volumes, resources in use) on the pods.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from kubernetes.utils import parse_quantity

from sdp.errors import UserError
from sdp.kube import Object

GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True)
class Fit:
    """The nodes that fit the pods of a group."""

    nodes: tuple[str, ...]
    room: int
    """Pods that fit these nodes together if they are idle."""
    reasons: Mapping[str, int]
    """Reasons why other nodes do not fit, each with its number of nodes."""

    def why_not(self) -> str:
        """Return the reasons in one line, the most frequent first."""
        ordered = sorted(self.reasons.items(), key=lambda item: -item[1])
        return "; ".join(f"{count} node{'s' * (count > 1)}: {reason}" for reason, count in ordered[:4])


def place(pod: Object, nodes: Iterable[Object]) -> Fit:
    """Return the nodes that fit a pod's spec, and how many such pods they fit."""
    needed = requests(pod)
    names, room = [], 0
    reasons: Counter[str] = Counter()
    for node in nodes:
        capacity = _capacity(node)
        if obstacles := list(_obstacles(pod, needed, node, capacity)):
            reasons[", ".join(obstacles)] += 1
        else:
            names.append(node["metadata"]["name"])
            counts = [capacity[resource] // amount for resource, amount in needed.items() if amount > 0]
            room += int(min([*counts, capacity.get("pods", Decimal(110))]))
    return Fit(tuple(names), room, reasons)


def requests(pod: Object) -> dict[str, Decimal]:
    """Return the sum of the containers' requests."""
    total: dict[str, Decimal] = {}
    for container in pod.get("containers") or ():
        resources = container.get("resources") or {}
        # A limit without a request counts as a request.
        for name, amount in _parsed({**(resources.get("limits") or {}), **(resources.get("requests") or {})}).items():
            total[name] = total.get(name, Decimal(0)) + amount
    return dict(sorted(total.items()))


def _obstacles(
    pod: Object, needed: Mapping[str, Decimal], node: Object, capacity: Mapping[str, Decimal]
) -> Iterator[str]:
    labels = node["metadata"].get("labels") or {}
    for key, value in (pod.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            yield f"has {key}={labels[key]}, not {value}" if key in labels else f"lacks {key}={value}"
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerated(pod, taint):
            value = f"={taint['value']}" if taint.get("value") else ""
            yield f"has the taint {taint['key']}{value}:{taint['effect']}"
    for resource, amount in needed.items():
        if amount > (has := capacity.get(resource, Decimal(0))):
            yield f"has {_shown(has, resource)} of {resource}, needed {_shown(amount, resource)}"


def _tolerated(pod: Object, taint: Object) -> bool:
    return any(
        toleration.get("key") in (None, "", taint["key"])
        and toleration.get("effect") in (None, "", taint["effect"])
        and (
            toleration.get("operator") == "Exists"
            or (toleration.get("key") and toleration.get("value", "") == taint.get("value", ""))
        )
        for toleration in pod.get("tolerations") or ()
    )


def _capacity(node: Object) -> dict[str, Decimal]:
    return _parsed((node.get("status") or {}).get("allocatable") or {})


def _parsed(amounts: Mapping[str, str]) -> dict[str, Decimal]:
    try:
        return {name: parse_quantity(amount) for name, amount in amounts.items()}
    except ValueError as error:
        raise UserError(f"resources: expected Kubernetes quantities, got {dict(amounts)} ({error})") from error


def _shown(amount: Decimal, resource: str) -> str:
    """Return an amount as text, memory in GiB."""
    if resource.endswith(("memory", "storage")) or "hugepages-" in resource:
        return f"{float(amount / 2**30):.4g}Gi"
    return f"{float(amount):.6g}"
