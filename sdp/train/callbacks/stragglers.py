"""Names the slowest worker: all wait for it in collectives, so all look equally slow."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sdp.train.trainer import Callback, StepReport, Trainer

OWN_PARTS = ("data", "copy", "forward")
"""The parts of a step before the first collective. Under fsdp forward has collectives, and only data and copy count."""


@dataclass
class NameSlowest(Callback):
    """Compares the workers' own times before each line of metrics; it must come before the callback that writes it."""

    every_steps: int
    _seconds: list[float] = field(default_factory=lambda: [0.0] * len(OWN_PARTS))
    _steps: int = 0
    _hosts: list[str] = field(default_factory=list)

    def on_start(self, trainer: Trainer) -> None:
        self._hosts = trainer.world.gather(socket.gethostname())

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if trainer.world.size == 1:
            return
        self._seconds = [s + report.parts.get(part, 0.0) for s, part in zip(self._seconds, OWN_PARTS, strict=True)]
        self._steps += 1
        if report.step % self.every_steps:
            return
        times = trainer.world.all_gather([seconds / self._steps for seconds in self._seconds])
        self._seconds, self._steps = [0.0] * len(OWN_PARTS), 0
        if trainer.world.is_main:
            worker = slowest(times)
            trainer.gauges["slowest"] = {**worker, "host": self._hosts[worker["rank"]]}


def slowest(times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the slowest worker, its excess time and the part of the step, given each worker's seconds by part."""
    totals = [sum(parts) for parts in times]
    rank = max(range(len(totals)), key=lambda number: totals[number])
    others = [number for number in range(len(totals)) if number != rank]
    usual = median(totals[number] for number in others)
    extra = [times[rank][p] - median(times[number][p] for number in others) for p in range(len(OWN_PARTS))]
    return {
        "rank": rank,
        "seconds": round(totals[rank], 6),
        "others": round(usual, 6),
        "part": OWN_PARTS[max(range(len(extra)), key=lambda part: extra[part])],
    }


def behind(worker: Mapping[str, Any]) -> float:
    """Return the excess of the slowest worker over the median of the others; 0.2 means a fifth longer."""
    return float(worker["seconds"] / worker["others"] - 1) if worker["others"] else 0.0
