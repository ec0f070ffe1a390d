"""How many encoders the trainers need, from what both can do when neither waits for the other."""

import math
from dataclasses import dataclass, field

_TOLERANCE = 0.02
"""Of an encoder: for less than that no other one is begun."""
_SLACK = 0.1
"""Of an encoder: so much has to be left over where one fewer is to do."""
_PATIENCE = 3
"""Looks in a row that have to agree."""


@dataclass(slots=True)
class Pacer:
    """Follows the trainers. Capacities are measured, not throughput, so that its own changes do not deceive it."""

    least: int
    most: int
    aim: int = field(init=False)
    """How many encoders there are to be."""
    _calibrated: bool = False
    _others: int = 0

    def __post_init__(self) -> None:
        self.aim = self.least

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    def look(self, trainers: float, encoder: float) -> str | None:
        """Consider what the trainers can take and one encoder can make, in images a second; a change is explained."""
        if self.fixed or trainers <= 0 or encoder <= 0:
            return None
        ratio = trainers / encoder
        wanted = max(self.least, min(self.most, math.ceil(ratio - _TOLERANCE)))
        if wanted == self.aim - 1 and ratio > wanted - _SLACK:
            wanted = self.aim
        if not self._calibrated:
            self._calibrated, self.aim = True, wanted
            return explained(wanted, trainers, encoder, self.least, self.most)
        self._others = self._others + 1 if wanted != self.aim else 0
        if self._others < _PATIENCE:
            return None
        self._others, self.aim = 0, wanted
        return explained(wanted, trainers, encoder, self.least, self.most)


def explained(count: int, trainers: float, encoder: float, least: int, most: int) -> str:
    """Why so many, and what one fewer or more would do."""
    needed = trainers / encoder
    text = (
        f"{count} encoder{'s' * (count != 1)}: the trainers take {trainers:,.1f} img/s, one encoder makes "
        f"{encoder:,.1f}, which is {needed:.2f} encoders"
    )
    if math.ceil(needed - _TOLERANCE) > most:
        text += f" (encode.num_workers.max is {most})"
    elif math.ceil(needed - _TOLERANCE) < least:
        text += f" (encode.num_workers.min is {least})"
    others = [count - 1, count + 1] if count > 1 else [count + 1]
    return f"{text}; {'; '.join(f'with {n} {_effect(n * encoder, trainers)}' for n in (count, *others))}"


def _effect(made: float, taken: float) -> str:
    if made < taken:
        return f"trainers wait {100 * (1 - made / taken):.0f} % of their time"
    return f"encoders idle {100 * (1 - taken / made):.0f} %"


@dataclass(slots=True)
class Tuner:
    """How many transforms at once keep the encoders busy, from what both have taken so far."""

    most: int | None
    """The most to use; None for as many as it takes: those that find no CPU free ask an autoscaler for more."""
    first: int
    """With how many to begin."""
    _transform_s: float = 0.0
    _encode_s: float = 0.0

    def transformed(self, seconds: float) -> None:
        """How long one piece's transform took, reading included."""
        self._transform_s = _smooth(self._transform_s, seconds)

    def encoded(self, seconds: float) -> None:
        """How long an encoder was busy with one piece."""
        self._encode_s = _smooth(self._encode_s, seconds)

    def transforms(self, encoders: int, starved: bool) -> int:
        """A quarter more than the encoders' pace needs; all there are while they starve."""
        if not self._transform_s or not self._encode_s:
            return self._bounded(self.first)
        needed = math.ceil(1.25 * max(encoders, 1) * self._transform_s / self._encode_s) + 1
        return self._bounded(needed * 2 if starved else needed)

    def _bounded(self, count: int) -> int:
        return count if self.most is None else min(self.most, count)


def _smooth(mean: float, value: float) -> float:
    return value if not mean else 0.9 * mean + 0.1 * value
