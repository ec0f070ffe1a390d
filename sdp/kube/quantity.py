"""Kubernetes' quantities: 500m, 16Gi, 1e3."""

import re
from decimal import Decimal

_FACTORS = {
    "": Decimal(1),
    **{suffix: Decimal(10) ** (3 * step) for step, suffix in enumerate(("n", "u", "m"), -3)},
    **{suffix: Decimal(1000) ** step for step, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Decimal(1024) ** step for step, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([num]|[kMGTPE]i?|Ki)?)")


def parse(quantity: str | int | float) -> Decimal:
    """A quantity as a number; ValueError for what is none."""
    found = _QUANTITY.fullmatch(str(quantity).strip())
    if not found or found[3] == "ki":
        raise ValueError(f"{quantity!r} is no quantity of Kubernetes")
    if found[2]:
        return Decimal(found[1] + found[2])
    return Decimal(found[1]) * _FACTORS[found[3] or ""]


def shown(amount: Decimal, resource: str) -> str:
    """For people: memory in GiB, the rest as a number."""
    if resource.endswith(("memory", "storage")) or "hugepages-" in resource:
        return f"{float(amount / 2**30):.4g}Gi"
    return f"{float(amount):.6g}"
