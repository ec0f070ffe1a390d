"""LoRA: the trained weights, the contents of a checkpoint, and its use by other libraries."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdp.cli import main
from sdp.config.train import TrainConfig
from sdp.errors import ConfigError, NotFound, UserError
from sdp.families.sd import SD
from sdp.model import load
from sdp.model.checkpoints import read_weights
from sdp.model.trained import load_trained
from sdp.storage import open_storage
from sdp.train.plan import make_plan
from sdp.train.settle import settled
from tests.training import Watch, config, tiny_inputs, train, weights

STEPS = 4
KOHYA = re.compile(r"lora_unet_(down|mid|up)_block[a-z0-9_]+\.(alpha|lora_(down|up)\.weight)")
"""The names of kohya's scripts."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_inputs(tmp_path_factory.mktemp("lora"))


def how(root: Path, run: str = "run", **changes: Any) -> TrainConfig:
    usual = {"lora__rank": 3, "model__denoiser": "pretrained", "max_steps": STEPS, "ema__decay": None}
    return config(root, run, **{**usual, **changes})


@pytest.fixture(scope="module")
def trained(root: Path) -> dict[str, Tensor]:
    return weights(train(how(root)))


def checkpoint(root: Path, run: str = "run") -> Path:
    return root / run / f"checkpoints/step-{STEPS:09d}"


def predicted(unet: torch.nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    latents, text = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 77, 16, generator=draw)
    with torch.no_grad():
        return SD.predict(unet.eval(), latents, torch.tensor([10, 700]), text)


def test_a_checkpoint_holds_the_small_matrices_alone(root: Path, trained: dict[str, Tensor]) -> None:
    assert {name.rpartition(".lora_")[2] for name in trained} == {"A.weight", "B.weight"}
    assert all("attn" in name for name in trained)
    assert any(tensor.abs().max() > 0 for name, tensor in trained.items() if ".lora_B." in name)
    whole = sum(weight.numel() for weight in load.load_denoiser(root / "model", pretrained=True).parameters())
    size = sum(file.stat().st_size for file in checkpoint(root).rglob("*.bin"))
    assert size < 4 * whole


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("alpha", [None, 12.0])
def test_diffusers_draws_with_the_exported_file_what_the_merged_model_draws(
    root: Path, tmp_path: Path, alpha: float | None
) -> None:
    run = "run"
    if alpha is not None:
        run = "alpha"
        train(how(root, run, lora__alpha=alpha))
    file = tmp_path / "subject.safetensors"
    assert main(["export", str(root / run), str(file), "--lora", "--raw"]) == 0
    assert all(KOHYA.fullmatch(name) for name in load_file(file))
    pipeline = StableDiffusionPipeline.from_pretrained(root / "model")
    before = predicted(pipeline.unet)
    pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    expected = predicted(pipeline.unet)
    merged = load_trained(open_storage(str(checkpoint(root, run))), root / "model", ema=False, name="model")
    assert not torch.allclose(expected, before, atol=1e-4)
    assert torch.allclose(predicted(merged.unet), expected, atol=1e-5)
    assert main(["export", str(root / run), str(tmp_path / "whole"), "--raw"]) == 0
    whole = StableDiffusionPipeline.from_pretrained(tmp_path / "whole").unet
    assert torch.allclose(predicted(whole), expected, atol=1e-5)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_a_file_of_another_program_is_a_beginning(root: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / "other.safetensors"
    if form == "kohya":
        assert main(["export", str(root / "run"), str(file), "--lora", "--raw"]) == 0
        tensors = {name: value * (2 if name.endswith("alpha") else 1) for name, value in load_file(file).items()}
        save_file({n: v / 2 if "lora_up" in n else v for n, v in tensors.items()}, file)  # as strong as before
    else:
        tensors = {}  # as diffusers' training scripts name and describe them
        for name, value in trained_of(root).items():
            stem, _, end = name.removeprefix("model.").partition(".lora_")
            matrix, factor = ("down", 1) if end[0] == "A" else ("up", 2)
            tensors[f"unet.{stem}.lora.{matrix}.weight"] = value / factor
        about = {"unet.lora_alpha": 6, "unet.r": 3, "unet.use_rslora": False, "unet.alpha_pattern": {}}
        save_file(tensors, file, {"format": "pt", "lora_adapter_metadata": json.dumps(about)})
    more = {"lora__start_from": str(file), "lora__alpha": 6.0, "optimizer__learning_rate": 1e-9, "max_steps": 1}
    begun = train(how(root, f"begun-{form}", **more)).trained
    first = trained_of(root)
    assert begun.keys() == first.keys()
    for name, value in begun.items():
        assert torch.allclose(value * (2 if ".lora_B." in name else 1), first[name], atol=1e-6)
    with pytest.raises(ConfigError, match=r"^lora\.rank: expected 3, as in .*other.safetensors, got 5"):
        train(how(root, "refused", lora__start_from=str(file), lora__rank=5))


def trained_of(root: Path) -> dict[str, Tensor]:
    return read_weights(open_storage(str(checkpoint(root))), ema=False)


def test_a_file_that_is_no_lora_of_the_model_is_refused(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    for content, line in (
        (
            {"lora_unet_input_blocks_1.lora_up.weight": torch.ones(1)},
            "no linear layer here is meant by lora_unet_input",
        ),
        ({}, "expected layers of one rank, got no tensors"),
        (None, "not a LoRA for Stable Diffusion"),
    ):
        file.write_bytes(b"none") if content is None else save_file(content, file)
        with pytest.raises(UserError, match=rf"^lora\.start_from: .*other.safetensors: .*{line}"):
            train(how(root, "refused", lora__start_from=str(file)))
    with pytest.raises(NotFound, match=r"absent\.safetensors"):
        train(how(root, "refused", lora__start_from=str(tmp_path / "absent.safetensors")))


def test_a_layer_of_a_file_without_a_place_is_refused_before_anything_is_taken(root: Path, tmp_path: Path) -> None:
    file, name = tmp_path / "other.safetensors", next(iter(trained_of(root))).partition(".lora_")[0]
    save_file({f"unet.{name}.lora_{end}.weight": torch.ones(3, 3) for end in "AB"}, file)
    (phase,) = settled(how(root, "refused", lora__start_from=str(file), lora__targets=["to_q"]))
    with pytest.raises(UserError, match=r"^lora\.start_from: no place for unet\..* of \(3, 3\); choose another file"):
        make_plan(phase)


def test_frozen_matrices_are_held_in_the_precision_to_which_each_step_rounds_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, Any] = {}
    own = load.load_denoiser
    for name in ("held", "rounded"):
        if name == "rounded":
            monkeypatch.setattr(load, "load_denoiser", lambda *a, **more: own(*a, **{**more, "matrices": None}))
        watch = Watch()
        trainer = train(how(root, name, precision="bf16"), callbacks=[watch])
        runs[name] = [(report.loss, report.norm) for report in watch.reports]
        frozen = {p.dtype for p in trainer.networks.parameters() if p.dim() > 1 and not p.requires_grad}
        assert frozen == {torch.bfloat16 if name == "held" else torch.float32}
        assert {p.dtype for p in trainer.networks.parameters() if p.requires_grad or p.dim() == 1} == {torch.float32}
    assert runs["held"] == runs["rounded"]


def test_what_cannot_be_is_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^lora.rank: expected at most 16, the size of layer .*, got 17; lower it"):
        train(how(root, "refused", lora__rank=17))
    with pytest.raises(UserError, match=r"^lora.targets: no linear layer has a name that ends with to_x"):
        train(how(root, "refused", lora__targets=["to_q", "to_x"]))
    with pytest.raises(ConfigError, match=r"model.denoiser: expected pretrained while lora.rank is set, got 'new'"):
        how(root, model__denoiser="new")
    train(config(root, "full", max_steps=1))
    assert main(["export", str(root / "full"), str(tmp_path / "a.safetensors"), "--lora"]) == 2
