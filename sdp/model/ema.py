"""The moving average of the weights, in fp32 and sharded like the model."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Ema:
    """The moving average: average ← decay · average + (1 − decay) · weights.

    The decay starts low, (1 + n) / (10 + n) at the n-th update, so that the average forgets the initial weights.
    """

    def __init__(self, trained: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._weights = dict(trained)
        self._average = {name: weights.detach().float().clone() for name, weights in trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        average, weights = (list(map(shard, tensors.values())) for tensors in (self._average, self._weights))
        torch._foreach_lerp_(average, weights, 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name: the tensors themselves, so that loading works in place."""
        return self._average


def shard(tensor: Tensor | DTensor) -> Tensor:
    """Return this worker's shard, on which operations need neither communication nor DTensor's dispatch."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
