"""LoRA's layers."""

import torch
from torch import nn

from sdp.families.classes import network_class
from sdp.families.sd import SD1
from sdp.model.lora import LoraLinear, add_lora, merge_lora, published


def test_rank_4_beside_all_of_attention_adds_797184_numbers_to_stable_diffusion_1() -> None:
    # As many as the published files of that rank hold.
    with torch.device("meta"):
        unet = network_class("UNet2DConditionModel").from_config(SD1.unet)
        add_lora(unet, 4, 1.0, ("to_q", "to_k", "to_v", "to_out.0"))
    assert sum(weight.numel() for weight in unet.parameters() if weight.requires_grad) == 797_184


def test_it_begins_as_the_layer_and_merging_changes_nothing() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7, bias=False))
    values = torch.randn(3, 6)
    before = network(values)
    add_lora(network, 2, 0.5, ("0", "1"))
    assert torch.equal(network(values), before)
    for layer in network:
        assert isinstance(layer, LoraLinear)
        nn.init.normal_(layer.lora_B.weight)
    beside = network(values)
    assert not torch.allclose(beside, before, atol=0.1)
    merge_lora(network)
    assert [type(layer) for layer in network] == [nn.Linear, nn.Linear]
    assert torch.allclose(network(values), beside, atol=1e-6)


def test_a_text_encoders_layers_have_names_that_older_transformers_know_too() -> None:
    layer = "encoder.layers.0.self_attn.q_proj.lora_B.weight"
    one = torch.ones(1)
    for name in (f"text_encoder.{layer}", f"text_encoder.text_model.{layer}"):
        assert published({name: one}, 4.0, "diffusers") == {f"text_encoder.text_model.{layer}": 4 * one}


def test_other_programs_get_the_names_and_the_scale_that_they_know() -> None:
    """The names are those of a file of kohya's scripts, the values those of its formula: up @ down * alpha / rank."""
    layers = {
        "unet.down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_out.0": (
            "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn2_to_out_0"
        ),
        "text_encoder.encoder.layers.11.self_attn.q_proj": "lora_te_text_model_encoder_layers_11_self_attn_q_proj",
    }
    down, up = torch.randn(2, 3), torch.randn(5, 2)
    weights = {f"{own}.lora_{part}.weight": each for own in layers for part, each in (("A", down), ("B", up))}
    made = published(weights, 4.0, "kohya")
    assert set(made) == {
        f"{name}.{part}" for name in layers.values() for part in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    for name in layers.values():
        value = made[f"{name}.lora_up.weight"] @ made[f"{name}.lora_down.weight"] * made[f"{name}.alpha"] / 2
        assert torch.allclose(value, 4.0 * up @ down)
