"""AdamW, its learning rate, and the judgement whether a step is fit to be taken."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from sdp.config.train import OptimizerConfig
from sdp.model.ema import shard

_BLOCK, _LEAST_PACKED = 256, 4096
"""Numbers that share a scale, and the fewest of a parameter whose averages are packed: torchao's own."""


class AdamW:
    """AdamW in one fused pass over the shards that lie on this worker.

    The device decides whether a step is taken and how far gradients are scaled down, so the host need not wait for
    either. A pass over plain tensors takes a quarter of the host's time that one over DTensors takes.

    With adamw_8bit both averages are kept in 8 bits, by torchao, in blocks of 256 numbers with a scale each. They are
    unpacked for the same step in fp32, one parameter at a time. What is small stays in fp32.
    """

    def __init__(self, trained: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._config: OptimizerConfig = config
        self._weights = dict(trained)
        self._means = {name: self._zeros(weights, signed=True) for name, weights in self._weights.items()}
        self._squares = {name: self._zeros(weights, signed=False) for name, weights in self._weights.items()}
        self._steps = {weights.device: torch.zeros((), device=weights.device) for weights in self._weights.values()}
        self._passes: dict[tuple[torch.device, str], list[str]] = {}
        """What is updated at once: all of a device, but each parameter with packed averages alone."""
        for name, weights in self._weights.items():
            alone = name if _is_packed(self._means[name]) else ""
            self._passes.setdefault((weights.device, alone), []).append(name)

    def _zeros(self, weights: Tensor, *, signed: bool) -> Tensor:
        count = weights.numel()
        if self._config.kind == "adamw" or count < _LEAST_PACKED or count % _BLOCK:
            return torch.zeros_like(weights)
        packed: Any = import_module("torchao.optim.subclass_8bit").OptimState8bit
        zeros: Tensor = packed.zeros(weights.shape, signed, _BLOCK, weights.device)
        return zeros

    @torch.no_grad()  # with gradients on, a DTensor makes a node of the graph of each
    def gradients(self) -> list[Tensor]:
        """Return this worker's shards of the gradients that there are."""
        return [shard(weights.grad) for weights in self._weights.values() if weights.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip: Tensor, divisor: Tensor | None = None) -> None:
        """Take a step with the gradients over `divisor`, unless `skip` is 1."""
        for device, steps in self._steps.items():
            steps.add_(1 - skip.to(device))
        for (device, _), names in self._passes.items():
            names = [name for name in names if self._weights[name].grad is not None]
            means, squares = ([_unpacked(state[name]) for name in names] for state in (self._means, self._squares))
            torch._fused_adamw_(
                [shard(self._weights[name]) for name in names],
                [shard(self._weights[name].grad) for name in names],  # type: ignore[arg-type]  # looked at above
                means,
                squares,
                [],
                [self._steps[device]] * len(names),
                lr=rate,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=self._config.weight_decay,
                eps=self._config.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=None if divisor is None else divisor.to(device),
                found_inf=skip.to(device),
            )
            for name, mean, square in zip(names, means, squares, strict=True):
                if _is_packed(self._means[name]):
                    _pack(self._means[name], mean, skip.to(device))
                    _pack(self._squares[name], square, skip.to(device))

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for weights in self._weights.values():
            weights.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return both averages by parameter name: the tensors in use, to be saved or loaded into."""
        state = {}
        for name in self._weights:
            averages: dict[str, Any] = {"exp_avg": self._means[name], "exp_avg_sq": self._squares[name]}
            for kind, average in averages.items():
                if _is_packed(average):
                    state[f"{kind}_codes.{name}"], state[f"{kind}_scales.{name}"] = average.codes, average.scale
                else:
                    state[f"{kind}.{name}"] = average
        return state

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps that the averages have behind them."""
        for each in self._steps.values():
            each.fill_(steps)


def _is_packed(average: Any) -> bool:
    return hasattr(average, "codes")


def _unpacked(average: Any) -> Tensor:
    """Return an average in fp32: the tensor in use, or a copy of one in 8 bits."""
    unpacked: Tensor = average.dequantize() if _is_packed(average) else shard(average)
    return unpacked


def _pack(average: Any, values: Tensor, skip: Tensor) -> None:
    """Keep values in 8 bits, unless `skip` is 1: packing what was unpacked is not always the same."""
    packed = average.codes, average.scale
    before = [tensor.clone() for tensor in packed]
    average.copy_(values)
    for tensor, was in zip(packed, before, strict=True):
        tensor.copy_(torch.where(skip > 0, was, tensor))


class LossScale:
    """The factor of fp16's loss: halved when gradients overflow, doubled after 2000 steps in a row without overflow.

    It lies on the device and changes there. It is 1, and stays so, unless `enabled`.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the last overflow."""

    def update(self, norm: Tensor) -> None:
        """Take in the norm of a step's gradients."""
        if self.enabled:
            torch._amp_update_scale_(self.factor, self._growth, 1 - norm.isfinite().float(), 2.0, 0.5, 2000)

    def state(self) -> tuple[float, int]:
        """Return the factor and the number of steps since the last overflow."""
        return self.factor.item(), int(self._growth.item())

    def restore(self, factor: float, growth: int) -> None:
        self.factor.fill_(factor)
        self._growth.fill_(growth)


def learning_rate(step: int, config: OptimizerConfig, last_step: int | None) -> float:
    """The learning rate of a step, counted from 1: a linear warm-up, then constant, cosine or linear to zero."""
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
    """Lets no bad step through: one whose loss or gradient is not finite, or whose gradient leaps."""

    spike: float | None = None
    """A gradient norm of so many times the usual one is a leap; None looks at nothing but finiteness."""
    usual_norm: float = 0.0
    """A moving average over good steps."""
    good_steps: int = 0
    bad_in_a_row: int = 0

    warm_up = 100
    """Good steps before a leap can be told from learning to walk."""

    def skips(self, loss: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        """Return 1 if a step with this loss, gradient norm and sum of weights is not to be taken, else 0."""
        good = (weight > 0) & loss.isfinite() & norm.isfinite()
        if self.spike is not None and self.good_steps >= self.warm_up:
            good &= norm <= self.spike * self.usual_norm
        return 1 - good.float()

    def judge(self, loss: float, norm: float, weight: float, *, skipped: bool) -> Verdict:
        """Take in a step, and return why it was skipped, if it was."""
        if not skipped:
            self.good_steps += 1
            self.usual_norm += (norm - self.usual_norm) * max(0.02, 1 / self.good_steps)
            self.bad_in_a_row = 0
            return "good"
        if weight == 0:
            return "empty"
        self.bad_in_a_row += 1
        return "spike" if math.isfinite(loss) and math.isfinite(norm) else "not_finite"
