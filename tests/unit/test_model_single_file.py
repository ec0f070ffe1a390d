"""The one file that other tools read: keys of the original, and the way back by diffusers' own converters."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.loaders import single_file_utils as theirs
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from scripts.published import VAE
from sdp.families import KnownModel
from sdp.families.classes import network_class
from sdp.families.sd import SD1, SD2
from sdp.model.export import Exported
from sdp.model.single_file import single_file

SMALL_UNET = {
    "block_out_channels": [8, 16, 32, 32],
    "attention_head_dim": 4,
    "cross_attention_dim": 8,
    "norm_num_groups": 4,
}
SMALL_VAE = {"block_out_channels": [8] * 4, "norm_num_groups": 4}
SMALL_TEXT = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}


def networks(family: KnownModel) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    vae: Any = AutoencoderKL
    text = CLIPTextConfig(**{**family.text_encoder, **SMALL_TEXT, "vocab_size": 10})
    unet = network_class("UNet2DConditionModel").from_config({**family.unet, **SMALL_UNET})
    return unet, vae.from_config({**VAE, **SMALL_VAE}), CLIPTextModel(text)


def assert_same(actual: dict[str, Tensor], network: nn.Module) -> None:
    """Compare weights by name; older names of a text encoder's begin with `text_model.`."""
    actual, expected = (
        {name.removeprefix("text_model."): value for name, value in weights.items()}
        for weights in (actual, network.state_dict())
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", [SD1, SD2], ids=["1", "2"])
def test_diffusers_converts_the_file_back_to_the_same_networks(family: KnownModel) -> None:
    unet, vae, text = networks(family)
    file = single_file(unet, vae, text)
    assert_same(theirs.convert_ldm_unet_checkpoint(dict(file), dict(unet.config)), unet)
    assert_same(theirs.convert_ldm_vae_checkpoint(dict(file), dict(vae.config)), vae)
    if family is SD1:
        assert_same(theirs.convert_ldm_clip_checkpoint(dict(file)), text)
    else:
        assert_same(theirs.convert_open_clip_checkpoint(text, dict(file)), text)


@pytest.mark.parametrize("form", ["folder", "single-file", "lora"])
def test_an_export_in_a_bucket_is_copied_before_it_is_loaded(form: Any) -> None:
    hint = Exported("s3://bucket/mine", "run", 5, "", True, form).hint
    assert hint.startswith("copy it here, then ")
    assert '("mine"' in hint
