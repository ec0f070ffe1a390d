"""AdamW, its learning rate, and the judgement whether a step is fit to be taken."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sdp.config.train import OptimizerConfig
from sdp.model.ema import named_parameters


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters, in one fused pass."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def moments(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """AdamW's two averages by parameter name, made if they are not there: the tensors, to be saved or loaded into."""
    found = {}
    for name, parameter in named_parameters(model):
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        found[f"exp_avg.{name}"] = state["exp_avg"]
        found[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return found


def set_steps_taken(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Tell AdamW how many steps its averages have behind them."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def learning_rate(step: int, config: OptimizerConfig, last_step: int | None) -> float:
    """The learning rate of a step, counted from 1: a linear warm-up, then constant, cosine or linear to zero."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant" or last_step is None:
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, last_step - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * left


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


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

    def judge(self, loss: float, norm: float, weight: float) -> Verdict:
        """Whether a step with this loss, gradient norm and sum of weights is to be taken."""
        verdict: Verdict = "good"
        if weight == 0:
            verdict = "empty"
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            verdict = "not_finite"
        elif self.spike is not None and self.good_steps >= self.warm_up and norm > self.spike * self.usual_norm:
            verdict = "spike"
        if verdict == "good":
            self.good_steps += 1
            self.usual_norm += (norm - self.usual_norm) * max(0.02, 1 / self.good_steps)
            self.bad_in_a_row = 0
        elif verdict != "empty":
            self.bad_in_a_row += 1
        return verdict
