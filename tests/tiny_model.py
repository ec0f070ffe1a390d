"""A model in diffusers layout that is far too small to be any good, and quick."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from tests.evaluate_kit import letter_tokenizer

UNET = {
    "sample_size": 8,
    "block_out_channels": [16, 32],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
    "use_linear_projection": True,
}
NOISE: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


def make_tiny_model(folder: Path, *, first: bool = False) -> Path:
    """Write a tiny model, as a Stable Diffusion 2 or as one of the first generation; return its folder."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = letter_tokenizer(folder)
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=len(tokenizer) - 2,
        eos_token_id=len(tokenizer) - 1,
        hidden_act="quick_gelu" if first else "gelu",
    )
    unet = {**UNET, "use_linear_projection": False, "attention_head_dim": 4} if first else UNET
    scheduler = PNDMScheduler(skip_prk_steps=True, **NOISE) if first else DDIMScheduler(clip_sample=False, **NOISE)
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=[8, 8, 8, 8],
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            latent_channels=4,
            norm_num_groups=4,
            scaling_factor=0.18215,
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(**unet),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()
    if first:  # as published, with a safety checker in a folder that sdp does not read
        index = json.loads((folder / "model_index.json").read_text())
        index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
        index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder
