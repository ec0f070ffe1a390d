"""Training's own step as one of 32 A100s that are not there: what goes where, in which precision, and what is sent."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.bench._fake_gpu import environment
from sdp.model.load import load_text_encoder
from sdp.model.sources import resolve
from tests.programs import ROOT, printed

RUN = """
import json, sys
from unittest import mock
import torch
from scripts.bench import _fake_gpu as fake_gpu
from sdp.model.schedule import NoiseSchedule
from sdp.train import strategies

def report(name, **case):
    sizes = {"batch": 4, "resolution": 64, "tiny": True}
    with mock.patch.object(sys, "dont_write_bytecode", True):
        report = fake_gpu.report_of({**fake_gpu.PLAIN, **sizes, **case})
        print(json.dumps({"name": name, **report}), flush=True)

def over_the_host(schedule, latents, noise, timesteps):
    return add_noise(schedule, latents.cpu().to(latents.device), noise, timesteps)

def compiled_for_any_shape(module, **options):
    return compiled(module, **{**options, "dynamic": True})

add_noise, compiled = NoiseSchedule.add_noise, torch.nn.Module.compile
report("ddp", kind="ddp")
report("fsdp", kind="fsdp", compile="eager")
report("both", kind="fsdp", train_text_encoder=True, shard="full_shard", steps=1)
report("both ddp", kind="ddp", train_text_encoder=True, steps=1)
report("accumulating", kind="fsdp", micro_batches=2, steps=1)
with (
    mock.patch.object(NoiseSchedule, "add_noise", over_the_host),
    mock.patch.dict(strategies.DTYPES, bf16=torch.float32),
    mock.patch.object(torch.nn.Module, "compile", compiled_for_any_shape),
):
    report("faulty", kind="ddp", compile="eager", steps=1)
"""

Reports = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, tool: Callable[[str], Path]) -> Reports:
    tool("cc")
    environ = environment(tmp_path_factory.mktemp("cuda"))
    text = printed([sys.executable, "-c", RUN], cwd=ROOT, env=environ, timeout=1500)
    return {report["name"]: report for report in map(json.loads, text.splitlines())}


def sent(report: Mapping[str, Any], activity: str) -> dict[tuple[str, int], float]:
    """Bytes by collective and number of workers."""
    return {(kind, workers): moved for at, kind, workers, _, moved in report["collectives"] if at == activity}


def parameters() -> int:
    from diffusers import UNet2DConditionModel

    kind: Any = UNet2DConditionModel
    config = kind.load_config(resolve("builtin:tiny").path / "unet")
    return sum(weights.numel() for weights in kind.from_config(config).parameters())


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]


def test_everything_after_the_copy_stays_on_the_worker_s_gpu(reports: Reports) -> None:
    assert all(not reports[name]["strays"] for name in ("ddp", "fsdp", "both"))
    assert set(reports["faulty"]["strays"]) == {"forward: _to_copy"}


def test_tensor_cores_get_bf16_and_nothing_else(reports: Reports) -> None:
    assert set(reports["ddp"]["heavy"]) == set(reports["fsdp"]["heavy"]) == {"bfloat16"}
    assert set(reports["faulty"]["heavy"]) == {"float32"}
    for kept in (reports[name]["kept"] for name in ("ddp", "fsdp")):
        assert kept.get("float32", 0) < 0.05 * kept["bfloat16"]


def test_ddp_sends_each_gradient_once_in_fp32(reports: Reports) -> None:
    assert sent(reports["ddp"], "forward") == {}
    assert sent(reports["ddp"], "backward") == {("allreduce", 32): 4 * parameters()}


def test_a_text_encoder_is_trained_beside_the_unet_or_in_the_same_shards(reports: Reports) -> None:
    both = parameters() + sum(
        weights.numel() for weights in load_text_encoder(resolve("builtin:tiny").path).parameters()
    )
    assert sent(reports["both ddp"], "backward") == {("allreduce", 32): 4 * both}
    assert sent(reports["both"], "forward") == {("allgather_base", 32): pytest.approx(2 * both, rel=0.02)}
    assert sent(reports["both"], "backward")["allgather_base", 32] == pytest.approx(2 * both, rel=0.02)  # full_shard
    assert not reports["both"]["strays"]
    assert set(reports["both"]["heavy"]) == set(reports["both ddp"]["heavy"]) == {"bfloat16"}


def test_shards_are_gathered_once_in_bf16_and_gradients_reduced_once_in_fp32(reports: Reports) -> None:
    count = parameters()
    forward, backward = sent(reports["fsdp"], "forward"), sent(reports["fsdp"], "backward")
    assert forward == {("allgather_base", 32): pytest.approx(2 * count, rel=0.02)}
    assert backward["reduce_scatter_base", 32] == pytest.approx(4 * count, rel=0.02)
    assert not [kind for kind, _ in backward if "allgather" in kind]


def test_micro_batches_share_one_gathering_and_one_reduction(reports: Reports) -> None:
    for activity in ("forward", "backward"):
        assert sent(reports["accumulating"], activity) == sent(reports["fsdp"], activity)


def test_a_step_exchanges_nothing_else_but_a_few_figures(reports: Reports) -> None:
    for report in reports.values():
        others = [moved for at, *_, moved in report["collectives"] if at not in ("forward", "backward")]
        assert others
        assert sum(others) < 100


def test_graphs_have_constant_shapes_and_no_breaks(reports: Reports) -> None:
    graphs = reports["fsdp"]["graphs"]
    assert graphs["count"] > 2
    assert (graphs["dynamic"], graphs["breaks"]) == (0, {})
    assert reports["faulty"]["graphs"]["dynamic"] > 0


def test_shards_take_the_memory_of_a_shard(reports: Reports) -> None:
    before = {name: reports[name]["memory"]["before"] for name in ("ddp", "fsdp")}
    gathered = sent(reports["fsdp"], "forward")["allgather_base", 32] / 2
    spared = 4 * 4 * (parameters() - gathered / 32)  # weights, two averages of AdamW and one of the weights
    assert before["ddp"] - before["fsdp"] == pytest.approx(spared, rel=0.02)
