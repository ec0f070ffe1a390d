"""Training in fp8, with a GPU's rounding on a CPU: close to bf16, not equal, and absent from checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.errors import UserError
from sdp.model.export import export
from sdp.train.assemble import assemble
from sdp.train.trainer import Trainer
from sdp.train.world import World
from tests.training import Watch, config, linked, train, weights
from tests.workers import run_workers

BF16 = {
    "precision": "bf16", "data__global_batch_size": 12, "data__batch_size": 12, "max_steps": 2,
    "model__unet": "pretrained",  # new weights predict 0 at first, in any precision
}  # fmt: skip
FP8 = {**BF16, "strategy__fp8": {"enabled": True, "emulate": True, "min_features": 16}}


@pytest.fixture(scope="module")
def inputs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the inputs, with a folder for this module's runs."""
    torch.set_num_threads(1)
    return linked(inputs, tmp_path_factory.mktemp("fp8"))


def trained(root: Path, run: str, changes: dict[str, Any]) -> tuple[Trainer, Watch]:
    watch = Watch()
    return train(config(root, run, **changes), callbacks=[watch]), watch


@pytest.fixture(scope="module")
def bf16(inputs: Path) -> tuple[Trainer, Watch]:
    return trained(inputs, "bf16", BF16)


@pytest.fixture(scope="module")
def in_fp8(inputs: Path) -> tuple[Trainer, Watch]:
    return trained(inputs, "fp8", FP8)


def test_a_step_is_near_to_one_in_bf16_and_not_the_same(
    bf16: tuple[Trainer, Watch], in_fp8: tuple[Trainer, Watch]
) -> None:
    """e4m3 has three fraction bits: an error of a sixteenth at most, which averages out in sums. The loss is within
    2 %, the gradient's norm within 10 %."""
    for actual, expected in zip(in_fp8[1].reports, bf16[1].reports, strict=True):
        assert actual.verdict == expected.verdict == "good"
        assert actual.loss == pytest.approx(expected.loss, rel=0.02)
        assert actual.loss != expected.loss
        assert actual.norm == pytest.approx(expected.norm, rel=0.1)
        assert actual.norm != expected.norm


def test_a_checkpoint_has_the_same_tensors_under_the_same_names(
    inputs: Path, bf16: tuple[Trainer, Watch], in_fp8: tuple[Trainer, Watch]
) -> None:
    assert list(in_fp8[0].networks.state_dict()) == list(bf16[0].networks.state_dict())
    indexes = []
    for run in ("bf16", "fp8"):
        index = json.loads((inputs / run / "checkpoints/step-000000002/tensors.json").read_text())
        indexes.append({name: (entry["dtype"], entry["size"]) for name, entry in index["tensors"].items()})
    assert indexes[0] == indexes[1]
    assert {dtype for dtype, _ in indexes[0].values()} == {"float32"}


def test_the_average_is_of_the_weights_in_fp32(inputs: Path, tmp_path: Path) -> None:
    how = config(inputs, str(tmp_path / "run"), **{**FP8, "max_steps": 1})
    trainer = assemble(how, World())
    before = {name: tensor for name, tensor in weights(trainer).items() if name.startswith("model.")}
    trainer.train()
    after = weights(trainer)
    decay = 2 / 11  # at the first update
    assert before
    for name, first in before.items():
        expected = decay * first + (1 - decay) * after[name]
        assert torch.allclose(after[name.replace("model.", "ema.", 1)], expected, atol=1e-7), name
    assert any(not torch.equal(first, after[name]) for name, first in before.items())


@pytest.mark.parametrize(("first", "then"), [(FP8, BF16), (BF16, FP8)], ids=["on-off", "off-on"])
def test_a_run_goes_on_whether_it_was_in_fp8_or_not(
    inputs: Path, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    run = str(tmp_path / "run")
    before, _ = trained(inputs, run, first)
    saved = weights(before)
    trainer = assemble(config(inputs, run, **{**then, "max_steps": 4}), World())
    trainer._restore()
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, saved[name]), name
    trainer, watch = trained(inputs, run, {**then, "max_steps": 4})
    assert [report.step for report in watch.reports] == [3, 4]


def test_what_is_exported_is_a_plain_unet(inputs: Path, in_fp8: tuple[Trainer, Watch], tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    export(str(inputs / "fp8/checkpoints/step-000000002"), str(tmp_path / "out"), ema=False)
    unet = UNet2DConditionModel.from_pretrained(tmp_path / "out" / "unet")
    for name, parameter in unet.named_parameters():
        assert type(unet.get_submodule(name.rpartition(".")[0])).__module__.partition(".")[0] != "torchao"
        assert torch.equal(parameter, in_fp8[0].tensors()[f"model.{name}"]), name


def worker(world: World, root: Path, run: str, changes: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    watch = Watch()
    trainer = train(config(root, run, **changes), world, [watch])
    return {name: tensor.numpy() for name, tensor in weights(trainer).items()}, watch.losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy__kind": "fsdp", "strategy__shard": "full_shard", "strategy__activation_checkpointing": True},
    ],
    ids=["ddp", "fsdp-full-recomputing"],
)
def test_several_workers_do_what_one_does(
    inputs: Path, in_fp8: tuple[Trainer, Watch], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Scales depend on each worker's inputs, and fsdp casts more to bf16 than autocast: losses are within 2 %."""
    how = {**FP8, "data__batch_size": 6, **changes}
    results = run_workers(2, worker, inputs, str(tmp_path / "run"), how)
    for tensors, losses in results:
        assert losses == pytest.approx(in_fp8[1].losses, rel=0.02)
        assert tensors.keys() == in_fp8[0].tensors().keys()
        assert {value.dtype.name for value in tensors.values()} == {"float32"}
    assert all((results[0][0][name] == value).all() for name, value in results[1][0].items())


def test_a_cpu_is_refused_unless_it_is_to_emulate(inputs: Path, tmp_path: Path) -> None:
    how = config(inputs, str(tmp_path / "run"), **BF16, strategy__fp8={"enabled": True, "min_features": 16})
    with pytest.raises(
        UserError, match=r"got a CPU; set strategy\.fp8\.emulate to try it there, slowly, or enabled to"
    ):
        assemble(how, World())
