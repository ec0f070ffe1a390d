"""The optimizer compared with torch's own, and conditions that skip a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit

from sdp.config.train import OptimizerConfig
from sdp.errors import UserError
from sdp.train.optimizer import AdamW, Guard, LossScale, require_torchao


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
    ("loss", "norm", "weight", "verdict"),
    [
        (0.5, 1.0, 8.0, "good"),
        (0.5, 1.0, 0.0, "empty"),
        (float("nan"), 1.0, 8.0, "not_finite"),
        (0.5, float("inf"), 8.0, "not_finite"),
        (0.5, 30.0, 8.0, "spike"),
        (float("nan"), float("nan"), 0.0, "empty"),
    ],
)
def test_the_device_skips_what_the_host_calls_bad(loss: float, norm: float, weight: float, verdict: str) -> None:
    guard = Guard(spike=10.0, usual_norm=2.0, good_steps=100)
    skip = guard.skips(*map(torch.tensor, (loss, norm, weight)))
    assert skip.item() == float(verdict != "good")
    assert guard.judge(loss, norm, weight, skipped=bool(skip)) == verdict


def test_a_leap_is_no_leap_while_the_model_learns_to_walk() -> None:
    guard = Guard(spike=10.0, usual_norm=2.0, good_steps=99)
    assert guard.skips(*map(torch.tensor, (0.5, 30.0, 8.0))).item() == 0.0


def test_the_loss_scale_moves_as_torchs_own() -> None:
    actual = LossScale(torch.device("cpu"), enabled=True)
    expected = torch.amp.GradScaler("cpu", enabled=True)
    weights = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weights])
    for norm in [1.0, float("inf"), *[1.0] * 2001, float("nan"), 1.0]:
        weights.grad = expected.scale(torch.tensor([norm]))
        expected.step(optimizer)
        expected.update()
        actual.update(torch.tensor(norm))
    state = expected.state_dict()
    assert actual.state() == (state["scale"], state["_growth_tracker"])
    other = LossScale(torch.device("cpu"), enabled=True)
    other.restore(*actual.state())
    assert other.state() == actual.state()


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64, bias=False))


def test_averages_in_8_bits_are_torchaos_and_near_to_those_in_32() -> None:
    how = {"learning_rate": 1e-2, "weight_decay": 0.1}
    packed, plain, unpacked = wide(), wide(), wide()
    optimizer = AdamW(dict(packed.named_parameters()), OptimizerConfig(kind="adamw_8bit", **how))
    in_32_bits = AdamW(dict(plain.named_parameters()), OptimizerConfig(**how))
    reference = AdamW8bit(unpacked.parameters(), lr=1e-2, weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        for step in range(8):
            for network, take in ((packed, optimizer), (plain, in_32_bits)):
                give_gradients(network, step)
                take.step(1e-2, skip=NO, divisor=torch.tensor(2.0))
            give_gradients(unpacked, step, 0.5)
            reference.step()
    pairs = zip(packed.parameters(), unpacked.parameters(), plain.parameters(), strict=True)
    for mine, other, exact in pairs:
        assert (mine - other).abs().mean() < 1e-5  # a rounding to another code here and there
        assert (mine - exact).abs().max() < 0.02
        assert (mine - exact).abs().mean() < 2e-3
    state = optimizer.state_dict()
    kinds = {name: tensor.dtype for name, tensor in state.items() if name.endswith(".0.weight")}
    assert kinds == {
        "exp_avg_codes.0.weight": torch.uint8, "exp_avg_scales.0.weight": torch.float32,
        "exp_avg_sq_codes.0.weight": torch.uint8, "exp_avg_sq_scales.0.weight": torch.float32,
    }  # fmt: skip
    assert state["exp_avg.0.bias"].dtype == torch.float32  # too small to pack
    bytes_ = sum(tensor.nbytes for name, tensor in state.items() if name.endswith("weight"))
    assert bytes_ == 2 * 64 * 128 * (2 + 2 * 4 / 256)


def test_a_skipped_step_leaves_packed_averages_as_they_are() -> None:
    network = wide()
    optimizer = AdamW(dict(network.named_parameters()), OptimizerConfig(kind="adamw_8bit"))
    give_gradients(network, 0)
    optimizer.step(1e-2, skip=NO)
    before = tensors(network, optimizer)
    give_gradients(network, 1, float("inf"))
    optimizer.step(1e-2, skip=YES)
    assert all(torch.equal(value, before[name]) for name, value in tensors(network, optimizer).items())


def test_a_missing_torchao_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.train.optimizer.find_spec", lambda name: None if name == "torchao" else pytest.fail(name))
    require_torchao("adamw")
    with pytest.raises(
        UserError, match=r"^optimizer\.kind: adamw_8bit needs torchao, .*; pip install .*set it to adamw$"
    ):
        require_torchao("adamw_8bit")
