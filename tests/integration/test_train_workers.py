"""Several workers: the strategies agree, and a run continues with any number of them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sdp.config.train import StrategyConfig
from sdp.datasets.ledger import Ledger
from sdp.device import DTYPES
from sdp.model import load
from sdp.model.sources import resolve
from sdp.train.assemble import make_networks
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.data.latents import GroupReader
from sdp.train.data.order import RowRange, Shuffle
from sdp.train.strategies import make_strategy
from sdp.train.world import World
from tests.training import Watch, config, train, weights
from tests.workers import run_workers


def worker(world: World, root: Path, run: str, changes: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """Train a run to its end; return its tensors and losses."""
    watch = Watch()
    trainer = train(config(root, run, **changes), world, [watch, SaveCheckpoints(2)])
    return {name: tensor.numpy() for name, tensor in weights(trainer).items()}, watch.losses


def close(these: dict[str, Any], those: dict[str, Any]) -> None:
    """Compare moments tightly and weights loosely: Adam divides by the gradient's size, which amplifies rounding."""
    assert these.keys() == those.keys()
    for name, value in these.items():
        tolerance = 2e-6 if name.startswith("exp_avg") else 5e-4
        assert torch.allclose(torch.from_numpy(value), torch.from_numpy(those[name]), atol=tolerance), name


ONE_STEP = {"data__global_batch_size": 12, "data__batch_size": 12, "max_steps": 3, "optimizer__clip_norm": 0.5}


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    torch.set_num_threads(1)
    return worker(World(), inputs, str(tmp_path_factory.mktemp("alone")), ONE_STEP)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, {}),
        slow(3, {"data__batch_size": 2}),
        (2, {"strategy__kind": "fsdp"}),
        slow(2, {"strategy__kind": "fsdp", "strategy__shard": "full_shard", "data__batch_size": 4}),
        slow(2, {"strategy__kind": "fsdp", "strategy__activation_checkpointing": True}),
    ],
    ids=["ddp", "ddp-accumulating", "fsdp", "fsdp-full-accumulating", "fsdp-recomputing"],
)
def test_workers_together_are_one_worker(
    inputs: Path, alone: tuple[dict[str, Any], list[float]], tmp_path: Path, count: int, changes: dict[str, Any]
) -> None:
    results = run_workers(count, worker, inputs, str(tmp_path / "run"), {**ONE_STEP, **changes})
    for tensors, losses in results:
        assert losses == pytest.approx(alone[1], abs=1e-5)
        close(tensors, alone[0])


PARTS = {**ONE_STEP, "model__denoiser": "pretrained"}
FULL = {"strategy__kind": "fsdp", "strategy__shard": "full_shard", "strategy__activation_checkpointing": True}


@pytest.mark.parametrize(
    ("networks", "changes", "name"),
    [
        ({"lora__rank": 4}, {"strategy__kind": "fsdp"}, ".lora_A."),
        ({"model__train_text_encoder": True}, FULL, "exp_avg.text_encoder."),
        slow({"model__train_text_encoder": True}, {"data__batch_size": 3}, "exp_avg.text_encoder."),
    ],
    ids=["lora", "text-encoder", "text-encoder-accumulating"],
)
def test_other_networks_learn_the_same_with_any_number_of_workers(
    inputs: Path, tmp_path: Path, networks: dict[str, Any], changes: dict[str, Any], name: str
) -> None:
    expected, losses = worker(World(), inputs, str(tmp_path / "alone"), {**PARTS, **networks})
    assert any(name in tensor for tensor in expected)
    for tensors, some in run_workers(2, worker, inputs, str(tmp_path / "run"), {**PARTS, **networks, **changes}):
        assert some == pytest.approx(losses, abs=1e-5)
        close(tensors, expected)


@pytest.mark.parametrize("lora", [None, 4])
def test_bf16_under_fsdp_keeps_fp32_weights_and_learns_the_same(
    inputs: Path, alone: tuple[dict[str, Any], list[float]], tmp_path: Path, lora: int | None
) -> None:
    changes = {**ONE_STEP, "strategy__kind": "fsdp", "precision": "bf16", "lora__rank": lora}
    if lora is not None:
        changes |= {"model__denoiser": "pretrained"}
        alone = worker(World(), inputs, str(tmp_path / "alone"), {**PARTS, "lora__rank": lora})
    (tensors, losses), _ = run_workers(2, worker, inputs, str(tmp_path / "run"), changes)
    assert {value.dtype.name for value in tensors.values()} == {"float32"}
    assert losses != alone[1]
    assert losses == pytest.approx(alone[1], abs=0.02)


def test_a_run_goes_on_with_another_number_of_workers_and_another_strategy(inputs: Path, tmp_path: Path) -> None:
    expected, losses = worker(World(), inputs, str(tmp_path / "whole"), {**ONE_STEP, "max_steps": 6})
    seen: list[float] = []
    for steps, count, kind in ((2, 3, "ddp"), (4, 2, "fsdp"), (6, 1, "ddp")):
        changes = {**ONE_STEP, "max_steps": steps, "strategy__kind": kind}
        if count > 1:
            tensors, some = run_workers(count, worker, inputs, str(tmp_path / "run"), changes)[0]
        else:
            tensors, some = worker(World(), inputs, str(tmp_path / "run"), changes)
        seen += some
    assert seen == pytest.approx(losses, abs=2e-5)
    close(tensors, expected)
    ledger = Ledger.from_bytes((tmp_path / "run/checkpoints/step-000000006/ledger.roaring").read_bytes())
    assert list(ledger.rows(0)) == list(range(60))
    assert ledger.consumed(1) == 12


def rows_read(world: World, root: Path, run: str) -> int:
    """Train an epoch; return the number of rows that this worker read."""
    count, read = 0, GroupReader.read

    def counting(reader: GroupReader, ranges: Sequence[RowRange], *into: Any) -> None:
        nonlocal count
        count += sum(map(len, ranges))
        read(reader, ranges, *into)

    GroupReader.read = counting  # type: ignore[method-assign]  # in a process of its own
    with mock.patch("sdp.train.trainer.Shuffle", partial(Shuffle, lanes=1)):  # fewer than there are workers
        trainer = train(config(root, run, data__batch_size=4, max_steps=None, max_epochs=1), world)
    assert trainer.state.start.lanes == world.size
    return count


def test_more_workers_than_lanes_do_not_read_a_row_twice(inputs: Path, tmp_path: Path) -> None:
    assert sum(run_workers(3, rows_read, inputs, str(tmp_path / "run"))) == 60


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ddp_normalises_in_the_precision_of_the_run(precision: str) -> None:
    norms = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.Flatten(), torch.nn.LayerNorm(8, bias=False))
    strategy = make_strategy(StrategyConfig(kind="ddp"), norms, World(), precision)
    values = torch.arange(16.0).view(2, 4, 2)
    with strategy.forward():
        normalised = strategy.model(values)
    assert normalised.dtype == DTYPES[precision]
    grouped = (values.view(2, 2, 4) - values.view(2, 2, 4).mean(2, keepdim=True)) / 1.25**0.5
    assert torch.allclose(normalised.float().view(2, 2, 4), grouped, atol=0.01)
    normalised.float().square().sum().backward()
    assert all(weights.grad is not None and weights.grad.dtype == torch.float32 for weights in norms.parameters())


def unet_loaded_once(world: World, root: Path) -> list[float]:
    """Return sums of the U-Net's weights, which only the main worker may load."""
    if not world.is_main:
        load._diffusers = lambda *_: pytest.fail("loaded by another worker")
    how = config(root, model__denoiser="pretrained")
    unet = make_networks(how, resolve(how.model.source), world).unet
    return [weights.double().sum().item() for weights in unet.parameters()]


def test_only_the_main_worker_loads_the_unet(inputs: Path) -> None:
    main, other = run_workers(2, unet_loaded_once, inputs)
    assert main == other
    assert any(main)
