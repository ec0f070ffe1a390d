"""The moving average of the weights, in fp32, sharded as the model is."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Ema:
    """average ← decay · average + (1 − decay) · weights, for all parameters in one pass.

    The decay rises to its final value, (1 + n) / (10 + n) at the n-th update, so that the average forgets the random
    weights that it began with.
    """

    def __init__(self, trained: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._weights = dict(trained)
        self._average = {name: weights.detach().float().clone() for name, weights in trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after the step of this number, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        average, weights = (list(map(shard, each.values())) for each in (self._average, self._weights))
        torch._foreach_lerp_(average, weights, 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by parameter name; the tensors themselves, to be loaded into in place."""
        return self._average


def shard(tensor: Tensor | DTensor) -> Tensor:
    """Return the shard that lies here: work on it needs no communication and no dispatch to DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
