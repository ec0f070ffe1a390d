"""fp8: the chosen layers of the U-Net, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdp.config import TrainConfig
from sdp.config.train import Fp8Config
from sdp.errors import ConfigError, UserError
from sdp.hardware import GPUS
from sdp.model.family import SD2
from sdp.train import fp8, job
from tests.training import config

HAVING = "a GPU of compute capability 8.9 or higher (L4, L40S, H100-SXM, H100-PCIe, H100-NVL, H200, B200)"


def asking(root: Path, **changes: Any) -> TrainConfig:
    return config(root, **{"precision": "bf16", "strategy__fp8__enabled": True, **changes})


def stable_diffusion_2() -> nn.Module:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet: nn.Module = UNet2DConditionModel.from_config(dict(SD2.unet))
    return unet


# Of a transformer block of this U-Net ten layers are not the text's: proj_in and proj_out, four of attn1, attn2's query
# and output, two of ff. 1280 wide are two blocks on the way down, one in the middle, three on the way up; 640 are five.
@pytest.mark.parametrize(("least", "count"), [(1024, 60), (512, 110), (1281, 0)])
def test_of_stable_diffusion_2_the_wide_layers_of_its_transformers_are_chosen(least: int, count: int) -> None:
    unet = stable_diffusion_2()
    chosen = [n for n, m in unet.named_modules() if isinstance(m, nn.Linear) and fp8.gains(n, m, least)]
    assert len(chosen) == count
    assert not [name for name in chosen if "transformer_blocks" not in name and ".proj_" not in name]
    assert not [name for name in chosen if name.endswith(("attn2.to_k", "attn2.to_v")) or "time_emb" in name]


def test_a_layer_with_a_side_of_no_multiple_of_16_stays() -> None:
    assert fp8.gains("proj", nn.Linear(1280, 1296, device="meta"), 1024)
    assert not fp8.gains("proj", nn.Linear(1280, 1288, device="meta"), 1024)
    assert not fp8.gains("proj", nn.Linear(1288, 1280, device="meta"), 1024)


# Rows of a picture at the bottom of Stable Diffusion 2's U-Net, an eighth of its latents' side: 16, 64, 25, 9.
@pytest.mark.parametrize(("resolution", "padded"), [(256, False), (512, False), (320, True), (192, True)])
def test_batches_are_padded_where_a_pictures_rows_are_no_multiple_of_16(resolution: int, padded: bool) -> None:
    unet = stable_diffusion_2()
    assert fp8.convert(unet, Fp8Config(enabled=True, emulate=True), resolution, torch.device("cpu")) == 60
    layer: Any = unet.get_submodule("mid_block.attentions.0.proj_in")
    assert layer.config.pad_inner_dim is padded
    assert type(unet.get_submodule("time_embedding.linear_2")) is nn.Linear


def test_where_no_layer_is_wide_enough_the_widest_is_named() -> None:
    with pytest.raises(UserError) as caught:
        fp8.convert(
            stable_diffusion_2(), Fp8Config(enabled=True, emulate=True, min_features=2048), 256, torch.device("cpu")
        )
    assert str(caught.value) == (
        "strategy.fp8.min_features: expected at most 1280, the widest of this U-Net's linear layers, got 2048; lower "
        "it, or set strategy.fp8.enabled to false"
    )


def test_the_catalogue_knows_who_has_it() -> None:
    assert [gpu.name for gpu in GPUS.values() if not gpu.has_fp8] == ["A10G", "A100-40G", "A100-80G"]


def test_an_accelerator_without_it_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        job.run(asking(tmp_path, scaling__accelerator="A100"))
    assert str(caught.value) == (
        f"strategy.fp8.enabled: expected {HAVING}, got scaling.accelerator A100 (8.0); choose another, or set it to "
        "false"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling__accelerator": "H100"},
        {"scaling__accelerator": "L40S"},
        {"scaling__accelerator": "MI300X"},
        {"scaling__accelerator": "A100", "strategy__fp8__emulate": True},
        {"scaling__accelerator": "A100", "strategy__fp8__enabled": False},
    ],
)
def test_an_accelerator_that_has_it_or_is_unknown_passes(tmp_path: Path, changes: dict[str, Any]) -> None:
    fp8.require_fp8(asking(tmp_path, **changes))


@pytest.mark.parametrize(
    ("types", "gpus", "got"),
    [
        (["A10G", "A100"], 8, "the cluster's GPUs A100 (8.0), A10G (8.6); choose another, or set it to false"),
        (
            [],
            0,
            "a cluster without GPUs; set strategy.fp8.emulate to try it there, slowly, or enabled to false",
        ),
    ],
)
def test_a_cluster_without_it_is_refused(tmp_path: Path, types: list[str], gpus: int, got: str) -> None:
    with pytest.raises(UserError) as caught:
        fp8.refuse_cluster(asking(tmp_path), types, gpus)
    assert str(caught.value) == f"strategy.fp8.enabled: expected {HAVING}, got {got}"


def test_a_cluster_that_may_have_it_passes(tmp_path: Path) -> None:
    fp8.refuse_cluster(asking(tmp_path), ["A10G", "H100"], 8)
    fp8.refuse_cluster(asking(tmp_path), ["A100", "of-our-own"], 8)
    fp8.refuse_cluster(asking(tmp_path), [], 8)
    fp8.refuse_cluster(asking(tmp_path, scaling__can_grow=True), [], 0)
    fp8.refuse_cluster(asking(tmp_path, strategy__fp8__emulate=True), [], 0)


def test_without_torchao_the_command_that_installs_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "find_spec", lambda name: None if name == "torchao" else pytest.fail(name))
    with pytest.raises(UserError) as caught:
        job.run(asking(tmp_path))
    assert str(caught.value) == (
        "strategy.fp8.enabled: true needs torchao, which is not installed; pip install "
        "'torchao>=0.18,<1' (in the image, if the job runs on a cluster), or set it to false"
    )
    fp8.require_fp8(config(tmp_path))


@pytest.mark.parametrize(
    ("name", "capability", "refused"),
    [("NVIDIA A100-SXM4-80GB", (8, 0), True), ("NVIDIA L40S", (8, 9), False), ("NVIDIA H200", (9, 0), False)],
)
def test_a_worker_asks_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    unet = stable_diffusion_2()
    if not refused:
        assert fp8.convert(unet, Fp8Config(enabled=True), 256, torch.device("cuda", 0)) == 60
        return
    with pytest.raises(UserError) as caught:
        fp8.convert(unet, Fp8Config(enabled=True), 256, torch.device("cuda", 0))
    assert str(caught.value) == (
        f"strategy.fp8.enabled: expected {HAVING}, got NVIDIA A100-SXM4-80GB (8.0); set it to false"
    )


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_it_is_bf16_that_it_stands_in_for(tmp_path: Path, precision: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy.fp8.enabled: expected false while precision is {precision}"):
        asking(tmp_path, precision=precision)


def test_emulation_alone_would_do_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.fp8\.emulate: expected false while enabled is false"):
        asking(tmp_path, strategy__fp8__enabled=False, strategy__fp8__emulate=True)
