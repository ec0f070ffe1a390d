"""Dated prices of instances and storage, from prices.yaml or a file in its shape."""

import math
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sdp.config.base import REQUIRED, Section, key
from sdp.config.load import parse_into, read
from sdp.config.types import Name
from sdp.errors import ConfigError, Problem, UserError
from sdp.hardware import INSTANCES, Instance

_MIN_VCPUS = 8
"""Fewest vCPUs for each GPU of an instance: our estimate of what decoding images and reading latents need."""

Terms = Literal["on-demand", "reserved-1y", "reserved-3y", "spot"]


class Row(Section):
    """The price of one instance type."""

    instance: Name = key(REQUIRED)
    """The instance type."""
    per_hour: float = key(REQUIRED, ge=0)
    """The price of an hour."""
    terms: Terms = key("on-demand")
    """The terms of purchase."""
    region: Name = key(REQUIRED)
    """The region of the price."""
    as_of: date = key(REQUIRED)
    """The date of the price."""
    source: Name = key(REQUIRED)
    """The source of the price: a key of `sources`, or text."""

    def contradictions(self) -> Iterable[Problem]:
        if self.instance not in INSTANCES:
            yield self.problem("instance", f"one of {', '.join(INSTANCES)}")


class StoragePrice(Section):
    """The price of an object store."""

    per_gb_month: float = key(REQUIRED, ge=0)
    """The price of storing a gigabyte (1e9 bytes) for a month."""
    as_of: date = key(REQUIRED)
    """The date of the price."""
    source: Name = key(REQUIRED)
    """The source of the price."""


class Prices(Section):
    """All prices of one file."""

    currency: Name = key("USD")
    """The currency of every price."""
    region: Name = key(REQUIRED)
    """The region whose prices are taken."""
    storage: StoragePrice = key(REQUIRED)
    """The object store."""
    sources: dict[str, str] = key({})
    """Sources by name."""
    instances: tuple[Row, ...] = key(REQUIRED)
    """The instances."""

    def row(self, instance: str, terms: str) -> Row | None:
        """Return the newest price on these terms, preferably in this file's region."""
        rows = [row for row in self.instances if (row.instance, row.terms) == (instance, terms)]
        return max(rows, key=lambda row: (row.region == self.region, row.as_of), default=None)

    def best(self, gpus: Iterable[str], terms: str, workers: int | None = None, gpus_each: int = 1) -> Instance | None:
        """Return the cheapest priced instance with one of these GPUs; of equals, the one with most GPUs.

        Compare what all `workers` cost, whose last instance may be partly idle, or without a number what a GPU costs.
        """
        priced = [
            (
                round(row.per_hour * (instances(workers, gpus_each, instance) if workers else 1 / instance.gpus), 9),
                -instance.gpus,
                instance.name,
            )
            for instance in INSTANCES.values()
            if instance.gpu in set(gpus) and instance.vcpus >= _MIN_VCPUS * instance.gpus >= _MIN_VCPUS * gpus_each
            if (row := self.row(instance.name, terms)) is not None
        ]
        return INSTANCES[min(priced)[2]] if priced else None

    def gpu_hour(self, instance: str) -> float | None:
        """Return the on-demand price of an hour of one of an instance's GPUs; None if it is not known."""
        row = self.row(instance, "on-demand") if instance in INSTANCES and INSTANCES[instance].gpus else None
        return None if row is None else row.per_hour / INSTANCES[row.instance].gpus

    def need(self, instance: str, terms: str) -> Row:
        """Return a price; a UserError says how to supply one that is missing."""
        if (row := self.row(instance, terms)) is not None:
            return row
        raise UserError(
            f"plan: no price of {instance}, {terms}; add it to a copy of "
            f"{own_file('prices.yaml')} and pass that with --prices"
        )


def instances(workers: int, gpus_each: int, instance: Instance) -> int:
    """Return the number of instances for these workers; no worker spans two instances."""
    return math.ceil(workers / (instance.gpus // gpus_each))


def own_file(name: str) -> Path:
    """Return the path of a data file beside this module."""
    return Path(__file__).with_name(name)


def load_prices(path: str | None, region: str | None = None) -> Prices:
    """Read prices from a file, or the package's own; `region` replaces the file's."""
    try:
        prices = parse_into(Prices, read(path or str(own_file("prices.yaml"))))
    except ConfigError as error:
        problems = [
            Problem(f"--prices {p.path}", p.expected, p.got, p.hint and p.hint.partition(" or with --set")[0])
            for p in error.problems
        ]
        raise ConfigError(problems) from None
    regions = dict.fromkeys(row.region for row in prices.instances)
    if region is not None and region not in regions:
        raise UserError(f"plan: --region: expected one with prices ({', '.join(regions)}), got {region!r}")
    return prices.model_copy(update={"region": region or prices.region})


@cache
def reference() -> Mapping[str, Any]:
    """Return the published figures of reference.yaml."""
    return read(str(own_file("reference.yaml")))
