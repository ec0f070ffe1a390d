"""LoRA's layers."""

import pytest
import torch
from torch import Tensor, nn

from sdp.families.classes import network_class
from sdp.families.sd import SD1
from sdp.model.lora import LoraLinear, add_lora, matrices_of, merge_lora, published, strengths


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


LAYER, DOWN, UP = "transformer.blocks.0.to_q", torch.randn(2, 3), torch.randn(4, 2)


@pytest.mark.parametrize(
    "form",
    [
        "transformer.blocks.0.to_q.lora_{A,B}.weight",
        "transformer.blocks.0.to_q.lora_{down,up}.weight",
        "transformer.blocks.0.to_q.lora.{down,up}.weight",
        "transformer.blocks.0.to_q.lora_linear_layer.{down,up}.weight",
        "blocks.0.to_q.lora_{A,B}.default.weight",
        "diffusion_model.blocks.0.to_q.lora_{A,B}.weight",
        "base_model.model.blocks.0.to_q.lora_{A,B}.weight",
        "lora_unet_blocks_0_to_q.lora_{down,up}.weight",
        "diffusion_model.double.0.q.lora_{down,up}.weight",
    ],
)
@pytest.mark.parametrize("alpha", [None, 6.0])
def test_every_spelling_of_a_layer_is_read(form: str, alpha: float | None) -> None:
    before, ends, after = form.replace("}", "{").split("{")
    down, up = (f"{before}{end}{after}" for end in ends.split(","))
    scale = {} if alpha is None else {f"{down.partition('.lora')[0]}.alpha": torch.tensor(alpha)}
    read = matrices_of({**scale, down: DOWN, up: UP}, {LAYER: "transformer.double.0.q"})
    expected = UP if alpha is None else UP * 3
    assert torch.equal(read.pop(f"{LAYER}.lora_A.weight"), DOWN)
    assert torch.equal(read.pop(f"{LAYER}.lora_B.weight"), expected)
    assert not read


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"lora_A.weight": DOWN * torch.nan}, r"lora_A.weight is not a LoRA's: expected two finite matrices"),
        ({"lora_A.weight": DOWN.to(torch.int8)}, r"lora_A.weight is not a LoRA's"),
        ({"lora_A.weight": torch.tensor(1.0)}, r"lora_A.weight is not a LoRA's"),
        ({"alpha": torch.tensor(torch.nan)}, r"to_q.alpha is not a LoRA's"),
        ({"alpha": torch.ones(2)}, r"to_q.alpha is not a LoRA's"),
        ({"dora_scale": torch.ones(4, 1)}, r"to_q.dora_scale is not a LoRA's"),
        ({"lora_B.weight": None}, r"to_q lacks lora_B"),
        ({"lora_down.weight": DOWN}, r"to_q.lora_down.weight has two spellings"),
        ({"lora_B.weight": UP[:, :1]}, r"to_q has matrices of ranks 2 and 1"),
        ({"lora_A.weight": None, "lora_B.weight": None, "alpha": torch.tensor(1.0)}, r"to_q lacks lora_A"),
        ({"lora_A.weight": None, "lora_B.weight": None}, r"expected layers of one rank, got no tensors"),
        ({"lora_A.weight": DOWN[:0], "lora_B.weight": UP[:, :0]}, r"expected layers of one rank, got \[0\]"),
        ({"lora_down.double_blocks.1000000000.weight": DOWN}, r"no linear layer here is meant by .*1000000000"),
    ],
)
def test_a_damaged_or_foreign_lora_is_refused_by_the_name_of_the_tensor(
    changed: dict[str, Tensor | None], line: str
) -> None:
    ends = {"lora_A.weight": DOWN, "lora_B.weight": UP} | changed
    with pytest.raises(ValueError, match=line):
        matrices_of({f"{LAYER}.{end}": value for end, value in ends.items() if value is not None}, {LAYER: LAYER})


def test_a_layer_that_has_two_names_in_a_file_is_refused() -> None:
    names = ("transformer.blocks.0.to_q", "lora_unet_blocks_0_to_q")
    twice = {f"{name}.{end}": value for name in names for end, value in (("lora_A", DOWN), ("lora_B", UP))}
    with pytest.raises(ValueError, match=r"to_q has two spellings"):
        matrices_of(twice, {LAYER: LAYER})


def test_the_scale_that_diffusers_writes_beside_the_matrices_is_read() -> None:
    """diffusers' save_lora_weights stores each network's lora_alpha and r, and its loader divides them."""
    about = {"transformer.lora_alpha": 32, "transformer.r": 4, "transformer.alpha_pattern": {}}
    assert strengths(about | {"unet.lora_alpha": 4.0, "unet.r": 4}) == {"transformer": 8.0, "unet": 1.0}
    read = matrices_of({f"{LAYER}.lora_A": DOWN, f"{LAYER}.lora_B": UP}, {LAYER: LAYER}, {"transformer": 8.0})
    assert torch.equal(read[f"{LAYER}.lora_B.weight"], UP * 8)
    with pytest.raises(ValueError, match=r"its layers differ by transformer\.rank_pattern"):
        strengths(about | {"transformer.rank_pattern": {"to_q": 8}})
