"""Who this worker is among the others, and the few words that they exchange each step."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp import device as devices


@dataclass(frozen=True)
class World:
    """The workers of a run. One alone needs no process group."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    """Workers on this node."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of the U-Net, and of all that is exchanged."""
    second: torch.device | None = None
    """Of the text encoder and the VAE, where they have one of their own."""

    @property
    def encoding_device(self) -> torch.device:
        """The device of the text encoder and the VAE."""
        return self.second or self.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def collect(self, values: Sequence[float]) -> list[list[float]]:
        """The same few figures of each worker, by rank, on all of them."""
        table = torch.zeros(self.size, len(values), device=self.device)
        table[self.rank] = torch.tensor(values)
        collected: list[list[float]] = self.sum(table).tolist()
        return collected

    def gather(self, value: Any) -> list[Any]:
        """One object of each worker, by rank, on the main one; nothing elsewhere."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, gathered)
        return gathered or []

    def share(self, value: Any) -> Any:
        """The main worker's object, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether any worker has raised it."""
        raised = self.sum(torch.tensor([float(flag) for flag in flags], device=self.device))
        return [bool(count > 0) for count in raised.tolist()]

    def wait(self) -> None:
        """For all of them to come here."""
        self.agree([True])


def choose_device(local_rank: int = 0) -> torch.device:
    """Return this worker's GPU where torch sees one, else the CPU, set up for training."""
    chosen = devices.choose_device(local_rank)
    if chosen.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # As Ray has it. Threads of a small model wait for each other more than they work, six times as long as one
        # alone takes where the cores are busy; and sums would differ in the last bit between machines.
        torch.set_num_threads(1)
    return chosen
