"""Would a pod ever schedule on a node: its selector, its node affinity, the node's taints and what it has to give.

What the scheduler decides between pods (spread, anti-affinity, volumes bound to a zone) and what others use just now is
left out: this is about pods that could never run, which nobody is told of until they have waited for an hour.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sdp.kube.quantity import parse, shown

Object = Mapping[str, Any]

ZERO = Decimal(0)
_KEEPS_OUT = ("NoSchedule", "NoExecute")
_TOLD_ALREADY = tuple(f"node.kubernetes.io/{what}" for what in ("unschedulable", "not-ready", "unreachable"))
"""Taints that say again what a node's own state says."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Where the pods of a template fit."""

    nodes: tuple[str, ...]
    """The nodes that would take one."""
    room: int
    """How many they would take in all, were nothing else there."""
    reasons: Mapping[str, int]
    """What speaks against the other nodes, with how many it speaks against."""

    def why_not(self) -> str:
        """The reasons in a line, the most frequent first."""
        told = sorted(self.reasons.items(), key=lambda each: -each[1])
        return "; ".join(f"{count} node{'s' * (count > 1)}: {reason}" for reason, count in told[:4])


def place(pod_spec: Object, nodes: Iterable[Object]) -> Fit:
    """On which nodes a pod fits, and how many of its like do."""
    wants = requests(pod_spec)
    fitting, room = [], 0
    reasons: Counter[str] = Counter()
    for node in nodes:
        against = list(obstacles(pod_spec, wants, node))
        if against:
            reasons[", ".join(against)] += 1
        else:
            fitting.append(node["metadata"]["name"])
            room += capacity(wants, node)
    return Fit(tuple(fitting), room, reasons)


def obstacles(pod_spec: Object, wants: Mapping[str, Decimal], node: Object) -> Iterator[str]:
    """What keeps a pod off a node."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    labels = {**(node["metadata"].get("labels") or {})}
    ready = next((each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"), "True")
    if ready != "True":
        yield "is not ready"
    elif spec.get("unschedulable"):
        yield "is cordoned"
    for key, value in (pod_spec.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            yield f"has {key}={labels[key]}, not {value}" if key in labels else f"lacks {key}={value}"
    terms = _path(pod_spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    if terms and not any(_term(term, labels, node["metadata"]["name"]) for term in terms["nodeSelectorTerms"]):
        yield "does not match the node affinity"
    tolerations = pod_spec.get("tolerations") or ()
    for taint in spec.get("taints") or ():
        keeps_out = taint["effect"] in _KEEPS_OUT and taint["key"] not in _TOLD_ALREADY
        if keeps_out and not any(tolerates(each, taint) for each in tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            yield f"has the taint {taint['key']}{value}:{taint['effect']}"
    offers = status.get("allocatable") or {}
    for resource, amount in wants.items():
        has = parse(offers.get(resource, "0"))
        if amount > has:
            yield f"has {shown(has, resource)} of {resource}, needed {shown(amount, resource)}"


def capacity(wants: Mapping[str, Decimal], node: Object) -> int:
    """How many pods an empty node would take."""
    offers = (node.get("status") or {}).get("allocatable") or {}
    counts = [parse(offers.get(resource, "0")) // amount for resource, amount in wants.items() if amount > 0]
    counts.append(parse(offers.get("pods", "110")))
    return int(min(counts))


def requests(pod_spec: Object) -> dict[str, Decimal]:
    """What a pod asks for: its containers together, or its greediest first step, and its overhead."""
    together: dict[str, Decimal] = {}
    for container in pod_spec.get("containers") or ():
        _add(together, _asked(container))
    sidecars: dict[str, Decimal] = {}
    first: dict[str, Decimal] = {}
    for container in pod_spec.get("initContainers") or ():
        asked = _asked(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, asked)
            asked = dict(sidecars)
        else:
            asked = {name: asked.get(name, ZERO) + sidecars.get(name, ZERO) for name in {*asked, *sidecars}}
        for name, amount in asked.items():
            first[name] = max(first.get(name, ZERO), amount)
    _add(together, sidecars)
    total = {name: max(together.get(name, ZERO), first.get(name, ZERO)) for name in {*together, *first}}
    for name, amount in (pod_spec.get("overhead") or {}).items():
        total[name] = total.get(name, ZERO) + parse(amount)
    return dict(sorted(total.items()))


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether a toleration bears a taint."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key"):
        return bool(operator == "Exists")
    if toleration["key"] != taint["key"]:
        return False
    return bool(
        operator == "Exists" or (operator == "Equal" and (toleration.get("value") or "") == (taint.get("value") or ""))
    )


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes an object of these labels; an empty one takes all."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(each, labels) for each in selector.get("matchExpressions") or ()
    )


def _asked(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    # A limit without a request is a request, too.
    both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse(amount) for name, amount in both.items()}


def _add(total: dict[str, Decimal], more: Mapping[str, Decimal]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, ZERO) + amount


def _term(term: Object, labels: Mapping[str, str], name: str) -> bool:
    """A term holds when all of it does; an empty one holds for no node."""
    about, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not about and not fields:
        return False
    return all(_holds(each, labels) for each in about) and all(_holds(each, {"metadata.name": name}) for each in fields)


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    key, operator = expression["key"], expression["operator"]
    values: Sequence[str] = expression.get("values") or ()
    there = labels.get(key)
    match operator:
        case "In":
            return there in values
        case "NotIn":
            return there not in values
        case "Exists":
            return there is not None
        case "DoesNotExist":
            return there is None
        case "Gt" | "Lt":
            if there is None or not values or not there.lstrip("-").isdigit():
                return False
            return int(there) > int(values[0]) if operator == "Gt" else int(there) < int(values[0])
    return False


def _path(data: Object, *names: str) -> Any:
    here: Any = data
    for name in names:
        here = (here or {}).get(name)
    return here
