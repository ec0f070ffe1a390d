"""AdamW, its learning rate, the moving average, and when a bad step is skipped."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdp.config.train import OptimizerConfig


class AdamW:
    """AdamW in one fused pass over this worker's shards.

    The device decides whether a step is taken and how far gradients are scaled down, so the host does not wait for
    either. A pass over plain tensors takes a quarter of the host time of one over DTensors.
    """

    def __init__(self, trained: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._config: OptimizerConfig = config
        self._weights = dict(trained)
        self._means = {name: torch.zeros_like(weights) for name, weights in trained.items()}
        self._squares = {name: torch.zeros_like(weights) for name, weights in trained.items()}
        self._steps = torch.zeros((), device=next(iter(self._weights.values())).device)

    @torch.no_grad()  # or each DTensor would add a node to the graph
    def gradients(self) -> list[Tensor]:
        """Return this worker's shards of the gradients."""
        return [shard(weights.grad) for weights in self._weights.values() if weights.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip: Tensor, divisor: Tensor | None = None) -> None:
        """Take a step with the gradients divided by `divisor`, unless `skip` is 1."""
        self._steps.add_(1 - skip)
        names = [name for name, weights in self._weights.items() if weights.grad is not None]
        torch._fused_adamw_(
            [shard(self._weights[name]) for name in names],
            [shard(self._weights[name].grad) for name in names],  # type: ignore[arg-type]  # checked above
            [shard(self._means[name]) for name in names],
            [shard(self._squares[name]) for name in names],
            [],
            [self._steps] * len(names),
            lr=rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self._config.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
        )

    def zero_grad(self) -> None:
        """Free all gradients."""
        for weights in self._weights.values():
            weights.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return both moments by parameter name; they are the tensors in use, to save from and load into."""
        moments = {"exp_avg": self._means, "exp_avg_sq": self._squares}
        return {f"{kind}.{name}": tensors[name] for name in self._weights for kind, tensors in moments.items()}

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps that the moments have accumulated."""
        self._steps.fill_(steps)


def shard(tensor: Tensor | DTensor) -> Tensor:
    """Return this worker's shard, on which operations need neither communication nor DTensor's dispatch."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Ema:
    """The moving average of the weights, in fp32 and in shards: average ← decay · average + (1 − decay) · weights.

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


def learning_rate(step: int, config: OptimizerConfig, last_step: int | None) -> float:
    """Return the learning rate of a step, counted from 1: a linear warm-up, then constant, cosine or linear to 0."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant" or last_step is None:
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, last_step - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * left


def skips(loss: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """Return 1 if a step with this loss, gradient norm and sum of weights must be skipped, else 0."""
    return 1 - ((weight > 0) & loss.isfinite() & norm.isfinite()).float()
