"""AdamW, its learning rate, the moving average, and the guard that skips bad steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdp.config.train import OptimizerConfig
from sdp.errors import UserError

_BLOCK, _LEAST_PACKED = 256, 4096
"""torchao's limits: the numbers that share a scale, and the smallest parameter whose moments are packed."""


def require_torchao(kind: str) -> None:
    """Raise a UserError if the optimizer needs torchao, which is missing."""
    if kind == "adamw_8bit" and find_spec("torchao") is None:
        raise UserError(
            "optimizer.kind: adamw_8bit needs torchao, which is not installed; pip install 'torchao>=0.18,<1' (in the "
            "image, if the job runs on a cluster), or set it to adamw"
        )


class AdamW:
    """AdamW in one fused pass over this worker's shards.

    The device decides whether a step is taken and how far gradients are scaled down, so the host does not wait for
    either. A pass over plain tensors takes a quarter of the host time of one over DTensors.

    With adamw_8bit both moments are stored in 8 bits, by torchao, in blocks of 256 numbers with a scale each, and
    unpacked for the step in fp32, one parameter at a time. Small parameters keep theirs in fp32.
    """

    def __init__(self, trained: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._config: OptimizerConfig = config
        self._weights = dict(trained)
        self._means = {name: self._zeros(weights, signed=True) for name, weights in self._weights.items()}
        self._squares = {name: self._zeros(weights, signed=False) for name, weights in self._weights.items()}
        self._steps = torch.zeros((), device=next(iter(self._weights.values())).device)
        self._passes: dict[str, list[str]] = {}
        """Parameters updated in one pass: all, but each parameter with packed moments alone."""
        for name in self._weights:
            self._passes.setdefault(name if _is_packed(self._means[name]) else "", []).append(name)

    def _zeros(self, weights: Tensor, *, signed: bool) -> Tensor:
        count = weights.numel()
        if self._config.kind == "adamw" or count < _LEAST_PACKED or count % _BLOCK:
            return torch.zeros_like(weights)
        packed: Any = import_module("torchao.optim.subclass_8bit").OptimState8bit
        zeros: Tensor = packed.zeros(weights.shape, signed, _BLOCK, weights.device)
        return zeros

    @torch.no_grad()  # or each DTensor would add a node to the graph
    def gradients(self) -> list[Tensor]:
        """Return this worker's shards of the gradients."""
        return [shard(weights.grad) for weights in self._weights.values() if weights.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip: Tensor, divisor: Tensor | None = None) -> None:
        """Take a step with the gradients divided by `divisor`, unless `skip` is 1."""
        self._steps.add_(1 - skip)
        for names in self._passes.values():
            names = [name for name in names if self._weights[name].grad is not None]
            means, squares = ([_unpacked(state[name]) for name in names] for state in (self._means, self._squares))
            torch._fused_adamw_(
                [shard(self._weights[name]) for name in names],
                [shard(self._weights[name].grad) for name in names],  # type: ignore[arg-type]  # checked above
                means,
                squares,
                [],
                [self._steps] * len(names),
                lr=rate,
                beta1=0.9,
                beta2=self._config.beta2,
                weight_decay=self._config.weight_decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=skip,
            )
            for name, mean, square in zip(names, means, squares, strict=True):
                if _is_packed(self._means[name]):
                    _pack(self._means[name], mean, skip)
                    _pack(self._squares[name], square, skip)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for weights in self._weights.values():
            weights.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return both moments by parameter name; they are the tensors in use, to save from and load into."""
        state = {}
        for name in self._weights:
            moments: dict[str, Any] = {"exp_avg": self._means[name], "exp_avg_sq": self._squares[name]}
            for kind, moment in moments.items():
                if _is_packed(moment):
                    state[f"{kind}_codes.{name}"], state[f"{kind}_scales.{name}"] = moment.codes, moment.scale
                else:
                    state[f"{kind}.{name}"] = moment
        return state

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps that the moments have accumulated."""
        self._steps.fill_(steps)


def _is_packed(moment: Any) -> bool:
    return hasattr(moment, "codes")


def _unpacked(moment: Any) -> Tensor:
    """Return a moment in fp32: the tensor in use, or a copy of one in 8 bits."""
    unpacked: Tensor = moment.dequantize() if _is_packed(moment) else shard(moment)
    return unpacked


def _pack(moment: Any, values: Tensor, skip: Tensor) -> None:
    """Store values in 8 bits, unless `skip` is 1: packing unpacked values again may change them."""
    packed = moment.codes, moment.scale
    before = [tensor.clone() for tensor in packed]
    moment.copy_(values)
    for tensor, was in zip(packed, before, strict=True):
        tensor.copy_(torch.where(skip > 0, was, tensor))


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


class LossScale:
    """The scale of the loss in fp16: halved when gradients overflow, doubled after 2000 steps without overflow.

    It is stored and changed on the device. Unless `enabled` it is always 1.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the last overflow."""

    def update(self, norm: Tensor) -> None:
        """Update the scale by the norm of a step's gradients."""
        if self.enabled:
            torch._amp_update_scale_(self.factor, self._growth, 1 - norm.isfinite().float(), 2.0, 0.5, 2000)

    def state(self) -> tuple[float, int]:
        """Return the factor and the number of steps since the last overflow."""
        return self.factor.item(), int(self._growth.item())

    def restore(self, factor: float, growth: int) -> None:
        self.factor.fill_(factor)
        self._growth.fill_(growth)


def learning_rate(step: int, config: OptimizerConfig, last_step: int | None) -> float:
    """Return the learning rate of a step, counted from 1: a linear warm-up, then constant, cosine or linear to 0."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant" or last_step is None:
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, last_step - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * left


Verdict = Literal["good", "not_finite", "spike", "empty"]


@dataclass(slots=True)
class Guard:
    """Skips bad steps: loss or gradient is not finite, or the gradient's norm is a spike."""

    spike: float | None = None
    """The multiple of the usual gradient norm above which a norm is a spike; None disables this check."""
    usual_norm: float = 0.0
    """The moving average of the gradient norm over good steps."""
    good_steps: int = 0
    bad_in_a_row: int = 0

    warm_up = 100
    """Good steps before spikes are detected, since early norms vary widely."""

    def skips(self, loss: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        """Return 1 if a step with this loss, gradient norm and sum of weights must be skipped, else 0."""
        good = (weight > 0) & loss.isfinite() & norm.isfinite()
        if self.spike is not None and self.good_steps >= self.warm_up:
            good &= norm <= self.spike * self.usual_norm
        return 1 - good.float()

    def judge(self, loss: float, norm: float, weight: float, *, skipped: bool) -> Verdict:
        """Record a step; return "good", or why it was skipped."""
        if not skipped:
            self.good_steps += 1
            self.usual_norm += (norm - self.usual_norm) * max(0.02, 1 / self.good_steps)
            self.bad_in_a_row = 0
            return "good"
        if weight == 0:
            return "empty"
        self.bad_in_a_row += 1
        return "spike" if math.isfinite(loss) and math.isfinite(norm) else "not_finite"
