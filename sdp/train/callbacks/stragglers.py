"""Names the slowest worker: in a collective all wait for it, and all look equally slow."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from sdp.train.callbacks.base import Callback, StepReport

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer

OWN_PARTS = ("data", "copy", "forward")
"""Of a step, what a worker does before its gradients meet the others'. Under fsdp forward has collectives in it, and
there only data and copy can tell workers apart."""


@dataclass
class NameSlowest(Callback):
    """Compares the workers' own times, as often as a line of metrics is written; before the callback that writes it."""

    every_steps: int
    _seconds: list[float] = field(default_factory=lambda: [0.0] * len(OWN_PARTS))
    _steps: int = 0
    _hosts: list[str] = field(default_factory=list)

    def on_start(self, trainer: "Trainer") -> None:
        self._hosts = trainer.world.gather(socket.gethostname())

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        if trainer.world.size == 1:
            return
        self._seconds = [s + report.parts.get(part, 0.0) for s, part in zip(self._seconds, OWN_PARTS, strict=True)]
        self._steps += 1
        if report.step % self.every_steps:
            return
        times = trainer.world.collect([seconds / self._steps for seconds in self._seconds])
        self._seconds, self._steps = [0.0] * len(OWN_PARTS), 0
        if trainer.world.is_main:
            found = slowest(times)
            trainer.gauges["slowest"] = {**found, "host": self._hosts[found["rank"]]}


def slowest(times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of workers, each with its seconds by part: who is slowest, by how much, and in what most."""
    whole = [sum(parts) for parts in times]
    rank = max(range(len(whole)), key=lambda number: whole[number])
    others = [number for number in range(len(whole)) if number != rank]
    usual = median(whole[number] for number in others)
    extra = [times[rank][p] - median(times[number][p] for number in others) for p in range(len(OWN_PARTS))]
    return {
        "rank": rank,
        "seconds": round(whole[rank], 6),
        "others": round(usual, 6),
        "part": OWN_PARTS[max(range(len(extra)), key=lambda part: extra[part])],
    }


def behind(found: Mapping[str, Any]) -> float:
    """How much longer the slowest takes than the others usually do: 0.2 is a fifth."""
    return float(found["seconds"] / found["others"] - 1) if found["others"] else 0.0
