"""Exports load in the oldest and in the newest diffusers, and predict there what the trained networks do."""

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.cli import main
from sdp.families.tokenizer import load_tokenizer, token_ids
from sdp.model.sources import resolve
from sdp.model.trained import load_trained
from sdp.storage import open_storage
from tests.latents import make_latents
from tests.programs import printed
from tests.training import config, train

PROMPT = "a red circle"
CODE = """
import json, torch
from diffusers import StableDiffusionPipeline as SD

def loaded(form):
    if form == "folder":
        return SD.from_pretrained("folder")
    if form == "single-file":
        return SD.from_single_file("one.safetensors", config="folder")
    pipeline = SD.from_pretrained("model", torch_dtype=torch.float32)
    pipeline.load_lora_weights(".", weight_name=f"{form}.safetensors")
    return pipeline

def figures(pipeline):
    tokens = pipeline.tokenizer("a red circle", padding="max_length", max_length=77, return_tensors="pt").input_ids
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prediction = pipeline.unet(noise, 700, pipeline.text_encoder(tokens)[0]).sample
    scheduler = pipeline.scheduler.config
    return scheduler["prediction_type"], scheduler["timestep_spacing"], prediction.flatten().tolist()

print(json.dumps({form: figures(loaded(form)) for form in ("folder", "single-file", "lora")}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of a run of both networks that predicts velocity, and of one that trains a LoRA beside both."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(resolve("builtin:tiny").path, root / "model")
    make_latents(root, 16, vocabulary=50)
    both: dict[str, Any] = {"model__denoiser": "pretrained", "model__train_text_encoder": True, "max_steps": 3}
    velocity = {"objective__prediction": "v", "objective__zero_terminal_snr": True}
    train(config(root, "whole", **both, **velocity))
    train(config(root, "beside", **both, lora__rank=3, lora__alpha=12.0, optimizer__learning_rate=0.01))
    for run, out, *options in (
        ("whole", "folder"),
        ("whole", "one.safetensors", "--single-file"),
        ("beside", "lora.safetensors", "--lora"),
    ):
        assert main(["export", str(root / run), str(root / out), *options]) == 0
    return root


def expected(root: Path, run: str) -> list[float]:
    """Return what a run's networks predict."""
    checkpoint = open_storage(str(root / run / "checkpoints/step-000000003"))
    networks = load_trained(checkpoint, root / "model", ema=True, name="model").eval()
    tokens = token_ids(load_tokenizer(root / "model"), [PROMPT])
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values: list[float] = networks(noise, torch.tensor([700]), tokens).flatten().tolist()
    return values


@pytest.mark.parametrize("age", ["newest", pytest.param("oldest", marks=pytest.mark.needs("diffusers-oldest"))])
def test_an_export_predicts_what_the_trained_networks_do(tool: Callable[[str], Path], root: Path, age: str) -> None:
    """The newest is this environment's. The oldest has one of its own, and takes torch and PEFT from this one."""
    python = tool("diffusers-oldest") if age == "oldest" else sys.executable
    borrowed = f"import sys\nsys.path.append({sysconfig.get_path('purelib')!r})\n"
    offline = {"HF_HOME": str(root / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command, env = [python, "-c", borrowed + CODE], os.environ | offline
    text = printed(command, cwd=root, env=env, timeout=240)
    velocity, noise = ["v_prediction", "trailing"], ["epsilon", "leading"]
    whole, beside = expected(root, "whole"), expected(root, "beside")
    for form, (prediction, spacing, values) in json.loads(text.splitlines()[-1]).items():
        is_whole = form in ("folder", "single-file")
        assert [prediction, spacing] == (velocity if is_whole else noise), form
        assert values == pytest.approx(whole if is_whole else beside, abs=1e-4), form
