"""The moving average of the weights, in fp32, sharded as the model is."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Ema:
    """average ← decay · average + (1 − decay) · weights, for all parameters in one pass.

    The decay rises to its final value, (1 + n) / (10 + n) at the n-th update, so that the average forgets the random
    weights that it began with.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._names = [name for name, _ in trained_parameters(model)]
        self._weights = [weights for _, weights in trained_parameters(model)]
        self._average = [weights.detach().float().clone() for weights in self._weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after the step of this number, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_([*map(shard, self._average)], [*map(shard, self._weights)], 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by parameter name; the tensors themselves, to be loaded into in place."""
        return dict(zip(self._names, self._average, strict=True))


def trained_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """What is trained, under the names that it has in the bare model, however that is wrapped or compiled."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module.").replace("_orig_mod.", ""), parameter


def shard(tensor: Tensor | DTensor) -> Tensor:
    """Return the shard that lies here: work on it needs no communication and no dispatch to DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
