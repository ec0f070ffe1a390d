"""Dated prices of instances, from prices.yaml or a file in its shape."""

import math
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from sdp.config.base import REQUIRED, Section, key
from sdp.config.load import parse_into, read_file
from sdp.config.types import Name
from sdp.errors import Problem, UserError
from sdp.hardware import INSTANCES, Instance

_MIN_VCPUS = 8
"""Fewest vCPUs for each GPU of an instance: our estimate of what decoding images and reading latents need."""


class Row(Section):
    """The price of one instance type."""

    instance: Name = key(REQUIRED)
    """The instance type."""
    per_hour: float = key(REQUIRED, ge=0)
    """The price of an hour."""
    as_of: date = key(REQUIRED)
    """The date of the price."""
    source: Name = key(REQUIRED)
    """The source of the price: a key of `sources`, or text."""

    def contradictions(self) -> Iterable[Problem]:
        if self.instance not in INSTANCES:
            yield self.problem("instance", f"one of {', '.join(INSTANCES)}")


class Prices(Section):
    """All prices of one file."""

    currency: Name = key("USD")
    """The currency of every price."""
    sources: dict[str, str] = key({})
    """Sources by name."""
    instances: tuple[Row, ...] = key(REQUIRED)
    """The instances."""
    storage_gb_month: float = key(0.0, ge=0)
    """The price of keeping a gigabyte for a month; 0 counts no storage."""

    def row(self, instance: str) -> Row | None:
        """Return the newest price of an instance."""
        rows = [row for row in self.instances if row.instance == instance]
        return max(rows, key=lambda row: row.as_of, default=None)

    def best(self, gpus: Collection[str], workers: int | None = None) -> Instance | None:
        """Return the cheapest priced instance with one of these GPUs; of equals, the one with most GPUs.

        Compare what all `workers` cost, whose last instance may be partly idle, or without a number what a GPU costs.
        """

        def rank(instance: Instance) -> tuple[float, int, str]:
            share = instances(workers, instance) if workers else 1 / instance.gpus
            return round(self.need(instance.name).per_hour * share, 9), -instance.gpus, instance.name

        suited = (each for each in INSTANCES.values() if each.gpu in gpus and each.vcpus >= _MIN_VCPUS * each.gpus > 0)
        return min((each for each in suited if self.row(each.name) is not None), key=rank, default=None)

    def gpu_hour(self, instance: str) -> float | None:
        """Return the price of an hour of one of an instance's GPUs; None if it is not known."""
        row = self.row(instance) if instance in INSTANCES and INSTANCES[instance].gpus else None
        return None if row is None else row.per_hour / INSTANCES[row.instance].gpus

    def need(self, instance: str) -> Row:
        """Return a price; a UserError says how to supply one that is missing."""
        if (row := self.row(instance)) is not None:
            return row
        copied = f"a copy of {own_file('prices.yaml')}"
        raise UserError(f"plan: no price of {instance}; add it to {copied} and pass that with --prices")


def instances(workers: int, instance: Instance) -> int:
    """Return the number of instances for workers with a GPU each."""
    return math.ceil(workers / instance.gpus)


def own_file(name: str) -> Path:
    """Return the path of a data file beside this module."""
    return Path(__file__).with_name(name)


def load_prices(path: str | None) -> Prices:
    """Read prices from a file, or the package's own."""
    source = read_file(path or str(own_file("prices.yaml")))
    with source.placed():
        return parse_into(Prices, source.data)


@cache
def reference() -> Mapping[str, Any]:
    """Return the published figures of reference.yaml."""
    return read_file(str(own_file("reference.yaml"))).data
