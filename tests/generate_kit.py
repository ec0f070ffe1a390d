"""A tiny model and checkpoints of it, for tests of the generate stage."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sdp.config import parse
from sdp.config.generate import GenerateConfig
from sdp.datasets.ledger import Ledger
from sdp.model import load
from sdp.model.checkpoints import EMA, MODEL, TrainState
from sdp.model.sources import resolve
from sdp.storage import open_storage
from sdp.train.checkpoint import CheckpointManager
from sdp.train.run_folder import RunFolder
from sdp.train.world import World
from tests.tiny_model import make_tiny_model


def tiny_model(folder: Path) -> Path:
    """Write a tiny model whose pictures are not all grey: its VAE's last layer has larger weights than usual."""
    make_tiny_model(folder)
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    weights["decoder.conv_out.weight"] = weights["decoder.conv_out.weight"] * 3
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def make_checkpoint(
    run: Path | str, model: Path, step: int = 3, *, ema: bool = True, prediction: str = "epsilon", spoil: str = ""
) -> str:
    """A checkpoint as training writes it, whose average and raw weights differ; returns its URI."""
    unet = load.load_denoiser(model, pretrained=True)
    tensors = {f"{MODEL}{name}": tensor.detach() * (1 + 0.01 * step) for name, tensor in unet.named_parameters()}
    if ema:
        tensors |= {f"{EMA}{name}": tensor.detach().clone() for name, tensor in unet.named_parameters()}
    if spoil:
        tensors[spoil][...] = torch.nan
    settings = {"source": {"uri": "latents"}, "output": {"uri": str(run)}, "model": {"source": str(model)}}
    objective, average = {"prediction": prediction}, {"decay": 0.99 if ema else None}
    config = parse("train", {**settings, "objective": objective, "ema": average}).model_dump(mode="json")
    resolved = resolve(str(model))
    metadata = {"model": {"source": str(resolved.source), "digest": resolved.digest}}
    saver = CheckpointManager(RunFolder(open_storage(str(run))), World(), config, metadata=metadata)
    saving = saver.stage(tensors, TrainState(step=step), Ledger())
    saving.written.result(timeout=60)
    saver.commit(saving)
    saver.close()
    return saving.folder.uri


def generate_config(
    out: Path | str, checkpoint: object, prompts: Iterable[str] = ("a", "b"), **more: Any
) -> GenerateConfig:
    """Return the configuration of a job that takes a few seconds: 64 pixels, 3 steps."""
    settings: dict[str, Any] = {
        "output": {"uri": str(out), "rows_per_file": 4},
        "checkpoint": str(checkpoint),
        "prompts": list(prompts),
        "resolution": 64,
        "sampler": {"steps": 3},
        "scaling": {"batch_size": 2},
    }
    for key, value in more.items():
        settings[key] = settings[key] | value if isinstance(settings.get(key), dict) else value
    return parse("generate", json.loads(json.dumps(settings)))
