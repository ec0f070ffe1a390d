"""Time and money of a plan: arithmetic over rates, instances and prices, and nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of one type that work together."""

    instance: str
    count: int
    gpus: float
    """GPUs of all of them."""
    per_hour: float
    """Price of all of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a plan."""

    name: str
    samples: float
    rate: float
    """Images a second."""
    hours: float
    gpu_hours: float
    cost: float
    groups: tuple[InstanceGroup, ...] = ()
    limit: str = ""
    """The part that sets the rate: trainers or encoders."""
    source: str = ""
    """Source of the rate."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages of one way to do a job."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def basis(self) -> str:
        """Return the least certain source of the trainers' speeds (of all speeds, in a job that does not train)."""
        timed = [stage for stage in self.stages if stage.rate]
        sources = [stage.source for stage in timed if stage.limit] or [stage.source for stage in timed]
        return "estimate" if any("estimate" in source for source in sources) else "published"

    @property
    def hours(self) -> float:
        return sum(stage.hours for stage in self.stages)

    @property
    def gpu_hours(self) -> float:
        return sum(stage.gpu_hours for stage in self.stages)

    @property
    def cost(self) -> float:
        return sum(stage.cost for stage in self.stages)


def stage(
    name: str,
    samples: float,
    rate: float,
    groups: Sequence[InstanceGroup],
    *,
    limit: str = "",
    source: str = "",
) -> Stage:
    """Return the stage that processes samples at a rate."""
    hours = samples / rate / 3600
    gpu_hours = hours * sum(group.gpus for group in groups)
    cost = hours * sum(group.per_hour for group in groups)
    return Stage(name, samples, rate, hours, gpu_hours, cost, tuple(groups), limit, source)


def encoders_needed(train: float, encode: float) -> int:
    """Return the number of encoders that keep trainers of this total speed from waiting."""
    return math.ceil(round(train / encode, 9))
