"""The optimizer compared with torch's own, and conditions that skip a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdp.config.train import OptimizerConfig
from sdp.train.optimizer import AdamW, skips


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def give_gradients(network: nn.Module, step: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for weights in network.parameters():
        weights.grad = torch.randn(weights.shape, generator=draw) * factor


def tensors(network: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    state = {**dict(network.named_parameters()), **optimizer.state_dict()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


NO, YES = torch.tensor(0.0), torch.tensor(1.0)


def test_steps_are_those_of_torchs_adamw_with_its_clipping() -> None:
    config: Any = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    actual, expected = model(), model()
    optimizer, reference = (
        AdamW(dict(actual.named_parameters()), config),
        torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1),
    )
    for step in range(5):
        give_gradients(actual, step)
        give_gradients(expected, step)
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 2.0)
        assert norm > 2.0
        reference.step()
        optimizer.step(1e-2, skip=NO, divisor=norm / 2.0)
    for mine, other in zip(actual.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)
        assert torch.allclose(
            optimizer.state_dict()["exp_avg.0.weight"], reference.state[next(expected.parameters())]["exp_avg"]
        )


def test_a_skipped_step_leaves_no_trace() -> None:
    config: Any = OptimizerConfig(learning_rate=1e-2)
    skipping, plain = model(), model()
    optimizer, reference = (AdamW(dict(network.named_parameters()), config) for network in (skipping, plain))
    for step in (1, 2):
        for network, stepper in ((skipping, optimizer), (plain, reference)):
            give_gradients(network, step)
            stepper.step(1e-2, skip=NO)
        before = tensors(skipping, optimizer)
        give_gradients(skipping, 0, float("nan"))
        optimizer.step(1e-2, skip=YES)
        assert all(torch.equal(value, before[name]) for name, value in tensors(skipping, optimizer).items())
    expected = tensors(plain, reference)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(skipping, optimizer).items())


@pytest.mark.parametrize(
    ("loss", "norm", "weight", "skipped"),
    [
        (0.5, 1.0, 8.0, False),
        (0.5, 1.0, 0.0, True),
        (float("nan"), 1.0, 8.0, True),
        (0.5, float("inf"), 8.0, True),
    ],
)
def test_a_step_is_skipped_that_is_not_finite_or_has_no_rows(
    loss: float, norm: float, weight: float, skipped: bool
) -> None:
    assert bool(skips(*map(torch.tensor, (loss, norm, weight)))) is skipped
