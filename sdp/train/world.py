"""This worker's place among the others, and the small collectives between them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sdp.errors import SdpError

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """The workers of a run. A single one needs no process group."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_of(self, values: Tensor) -> Tensor:
        """Sum values over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def copy_main(self, values: Tensor) -> None:
        """Overwrite values with the main worker's, in place."""
        if self.size > 1:
            dist.broadcast(values, 0)

    def gather(self, value: Result) -> list[Result]:
        """Return every worker's object, by rank, on all workers."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Result) -> Result:
        """Return the main worker's object on all workers."""
        return self.gather(value)[0]

    def together(self, work: Callable[[], Result]) -> Result:
        """Return the result of this worker's `work`; if any worker's raises, raise on all, so that none waits."""
        try:
            result = work()
        except Exception as error:
            is_picklable = isinstance(error, SdpError)  # others may not be
            self.gather(error if is_picklable else RuntimeError(f"{type(error).__name__}: {error}"))
            raise
        replies: list[Exception | None] = self.gather(None)
        if errors := [reply for reply in replies if reply is not None]:
            raise errors[0]
        return result

    def any_of(self, flag: bool) -> bool:
        """Return whether any worker has set a flag."""
        return bool(self.sum_of(torch.tensor([float(flag)], device=self.device)).item() > 0)

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        self.any_of(True)
