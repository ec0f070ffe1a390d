"""Optimizers of libraries, with the interface of our AdamW: torch's Adafactor and Muon, torchao's AdamW, Prodigy.

Their state exists from the start, so that a checkpoint can be loaded into it. The host decides whether a step is taken:
it waits for the device in every step, which our AdamW does not.
"""

import importlib
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor

from sdp.config.train import OptimizerConfig
from sdp.errors import UserError
from sdp.train.optimizer import AdamW

_NUMBERS = ("d", "d_max", "d_numerator")
"""The numbers that Prodigy learns, beside its tensors."""


def make_optimizer(trained: Mapping[str, Tensor], config: OptimizerConfig) -> "AdamW | Library | Both":
    """Return the optimizer of a configuration."""
    if config.kind == "adamw":
        return AdamW(trained, config)
    own: dict[str, Any] = {"weight_decay": config.weight_decay}
    if config.kind == "adafactor":
        return Library(trained, torch.optim.Adafactor(trained.values(), **own))
    if config.kind == "prodigy":
        with redirect_stdout(None):  # it prints
            prodigy = _imported("prodigyopt").Prodigy(trained.values(), safeguard_warmup=True, **own)
        return Library(trained, prodigy)
    if config.kind == "adamw8bit":
        return Library(trained, _imported("torchao.optim").AdamW8bit(trained.values(), **own))
    matrices = {n: weights for n, weights in trained.items() if weights.dim() == 2 and "embed" not in n}
    if not matrices:
        raise UserError("optimizer.kind: muon: the model has no matrices to train; use adamw")
    muon = torch.optim.Muon(matrices.values(), adjust_lr_fn="match_rms_adamw", **own)
    others = {name: weights for name, weights in trained.items() if name not in matrices}
    return Both(Library(matrices, muon), AdamW(others, config)) if others else Library(matrices, muon)


class Library:
    """An optimizer of torch's kind."""

    def __init__(self, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._weights, self._optimizer = dict(trained), optimizer
        self._numbers = torch.zeros(len(_NUMBERS), dtype=torch.float64)
        for weights in self._weights.values():
            weights.grad = torch.zeros_like(weights)
        self._set_rate(0.0)
        optimizer.step()  # changes no weights, but makes the state
        self.zero_grad()
        for weights in self._weights.values():
            if "p0" in (state := optimizer.state[weights]):  # where Prodigy began; one number for zeros
                state["p0"] = weights.detach().flatten().clone()
        self.set_steps_taken(0)

    def gradients(self) -> list[Tensor]:
        """Return the gradients."""
        return [weights.grad for weights in self._weights.values() if weights.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip: Tensor, divisor: Tensor | None = None) -> None:
        """Take a step with the gradients divided by `divisor`, unless `skip` is 1."""
        if skip:
            return
        if not self._steps:  # the weights may have been loaded since
            for weights in self._weights.values():
                if "p0" in (state := self._optimizer.state[weights]):
                    state["p0"].copy_(weights.flatten())
        self._steps += 1
        if divisor is not None:
            torch._foreach_div_(self.gradients(), divisor)
        self._set_rate(rate)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state by parameter name, without copying; a quantised tensor is stored as its parts."""
        tensors = dict[str, Tensor]()
        for name, weights in self._weights.items():
            for kind, value in self._optimizer.state[weights].items():
                inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
                tensors |= {f"{kind}.{part}.{name}": getattr(value, part) for part in inner}
                if not inner and isinstance(value, Tensor) and kind != "step":
                    tensors[f"{kind}.{name}"] = value
        if _NUMBERS[-1] in (group := self._optimizer.param_groups[0]):
            self._numbers.copy_(torch.tensor([group[name] for name in _NUMBERS], dtype=torch.float64))
            tensors["prodigy.numbers"] = self._numbers
        return tensors

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps that the state, which may have been loaded, has accumulated."""
        self._steps = steps
        for state in self._optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)
        if steps and _NUMBERS[-1] in (group := self._optimizer.param_groups[0]):
            group.update(zip(_NUMBERS, self._numbers.tolist(), strict=True))

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class Both:
    """Two optimizers, each of some weights."""

    def __init__(self, *steppers: AdamW | Library) -> None:
        self._steppers = steppers

    def gradients(self) -> list[Tensor]:
        return [gradient for stepper in self._steppers for gradient in stepper.gradients()]

    def step(self, rate: float, *, skip: Tensor, divisor: Tensor | None = None) -> None:
        for stepper in self._steppers:
            stepper.step(rate, skip=skip, divisor=divisor)

    def zero_grad(self) -> None:
        for stepper in self._steppers:
            stepper.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor for stepper in self._steppers for name, tensor in stepper.state_dict().items()}

    def set_steps_taken(self, steps: int) -> None:
        for stepper in self._steppers:
            stepper.set_steps_taken(steps)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"optimizer.kind: its library is not installed ({error}); pip install {package}") from error
