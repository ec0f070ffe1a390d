"""Our optimizer and those of libraries: their own steps, skipped ones, and resumption to the bit."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdp.config import draft_of, load
from sdp.config.train import OptimizerConfig
from sdp.errors import UserError
from sdp.hardware import GIB, GPUS
from sdp.plan.memory import estimate
from sdp.train.optimizer import skips
from sdp.train.optimizers import make_optimizer

NO, YES = torch.tensor(0.0), torch.tensor(1.0)
INSTALLED = {"prodigy": "prodigyopt", "adamw8bit": "torchao"}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(name) and not importlib.util.find_spec(name), reason=f"no {name}"))
    for kind in ("adamw", "adafactor", "muon", "prodigy", "adamw8bit")
    for name in [INSTALLED.get(kind, "")]
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 3))


def named(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters())


def settings(kind: str) -> Any:
    return OptimizerConfig(kind=kind, weight_decay=0.1)  # type: ignore[arg-type]


def learn(network: nn.Module, step: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for weights in network.parameters():
        weights.grad = torch.randn(weights.shape, generator=draw) * factor


def everything(network: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in {**named(network), **optimizer.state_dict()}.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_takes_the_same_steps_to_the_bit(kind: str) -> None:
    whole = model()
    optimizer = make_optimizer(named(whole), settings(kind))
    assert not differing(named(whole), named(model())), "the state is made without a step"
    names = optimizer.state_dict().keys()
    for step in range(6):
        if step == 3:
            saved = everything(whole, optimizer)
        learn(whole, step)
        optimizer.step(0.01, skip=NO, divisor=torch.tensor(2.0))
        before = everything(whole, optimizer)
        learn(whole, 99, float("nan"))
        optimizer.step(0.01, skip=YES)
        optimizer.zero_grad()
        assert not differing(before, everything(whole, optimizer)), "a skipped step leaves no trace"
    assert optimizer.state_dict().keys() == names

    resumed = model()
    continued = make_optimizer(named(resumed), settings(kind))
    for name, tensor in {**named(resumed), **continued.state_dict()}.items():
        tensor.detach().copy_(saved[name])
    continued.set_steps_taken(3)
    for step in range(3, 6):
        learn(resumed, step)
        continued.step(0.01, skip=NO, divisor=torch.tensor(2.0))
    assert not differing(everything(whole, optimizer), everything(resumed, continued))
    assert differing(named(whole), named(model())), "it has learnt"


def test_steps_are_those_of_torchs_adamw_with_its_clipping() -> None:
    mine, other = model(), model()
    optimizer = make_optimizer(named(mine), settings("adamw"))
    reference = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        learn(mine, step)
        learn(other, step)
        norm = nn.utils.clip_grad_norm_(other.parameters(), 2.0)
        assert norm > 2.0
        reference.step()
        optimizer.step(1e-2, skip=NO, divisor=norm / 2.0)
    for name, weights in named(mine).items():
        assert torch.allclose(weights, named(other)[name], rtol=1e-5, atol=1e-7)
        averages = optimizer.state_dict()[f"exp_avg.{name}"], reference.state[named(other)[name]]["exp_avg"]
        assert torch.allclose(*averages)


@pytest.mark.parametrize(
    ("loss", "norm", "weight", "skipped"),
    [(0.5, 1.0, 8.0, False), (0.5, 1.0, 0.0, True), (float("nan"), 1.0, 8.0, True), (0.5, float("inf"), 8.0, True)],
)
def test_a_step_is_skipped_that_is_not_finite_or_has_no_rows(
    loss: float, norm: float, weight: float, skipped: bool
) -> None:
    assert bool(skips(*map(torch.tensor, (loss, norm, weight)))) is skipped


def test_steps_are_those_of_the_library() -> None:
    mine, other = model(), model()
    matrices = [weights for weights in other.parameters() if weights.dim() == 2]
    rest = [weights for weights in other.parameters() if weights.dim() != 2]
    references = (
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
    )
    optimizer = make_optimizer(named(mine), settings("muon"))
    for step in range(4):
        learn(mine, step)
        learn(other, step)
        optimizer.step(0.01, skip=NO)
        for reference in references:
            reference.step()
    for name, weights in named(mine).items():
        assert torch.allclose(weights, named(other)[name], rtol=1e-5, atol=1e-7), name


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prodigyopt", None)
    with pytest.raises(UserError, match=r"optimizer\.kind: its library is not installed .*; pip install prodigyopt"):
        make_optimizer(named(model()), settings("prodigy"))


@pytest.mark.parametrize(
    ("kind", "rank", "times"),
    [("adamw", None, 2), ("prodigy", 4, 4), ("adamw8bit", None, 0.508), ("muon", None, 1.65), ("adafactor", 4, 0.25)],
)
def test_the_plan_counts_the_state_of_each_optimizer(kind: str, rank: int | None, times: float) -> None:
    values = {"optimizer.kind": kind, "lora.rank": rank, "model.denoiser": "pretrained"}
    config: Any = draft_of("train", values).config
    memory = estimate(config, GPUS["A100-80G"], 1, embedded=False)
    assert memory.parts["optimizer"] / memory.parts["gradients"] == pytest.approx(times, rel=1e-3)
    assert memory.parts["weights"] / GIB > (3 if rank is None else 1.6)


def test_only_our_adamw_is_sharded() -> None:
    job = ["source.uri=a", "output.uri=b", "model.source=builtin:tiny"]
    with pytest.raises(UserError, match=r"optimizer\.kind: expected adamw while strategy\.kind is fsdp"):
        load("train", None, [*job, "strategy.kind=fsdp", "optimizer.kind=muon"])
    several = [*job, "scaling.accelerator=A100", "scaling.num_workers=4"]
    assert load("train", None, several).strategy.kind == "fsdp"
    assert load("train", None, [*several, "optimizer.kind=muon"]).strategy.kind == "ddp"
