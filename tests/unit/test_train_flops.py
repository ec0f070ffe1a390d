"""The operations of one sample."""

import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scripts.published import VAE
from sdp.model.family import SD2, TOKENS, latent_shape, predict, unet_class, unet_flops
from sdp.plan.prices import reference
from sdp.train.fp8 import gains


@pytest.mark.parametrize(("resolution", "gigaflops"), [(256, 539), (512, 2409)])
def test_stable_diffusions_unet_costs_what_was_counted_by_others(resolution: int, gigaflops: float) -> None:
    assert unet_flops(SD2.unet, resolution) / 1e9 == pytest.approx(gigaflops, rel=0.01)


def test_the_vaes_decoder_costs_what_a_plan_reckons_with() -> None:
    for side, known in reference()["flops"]["decoder"].items():
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            AutoencoderKL.from_config(dict(VAE)).decode(torch.empty(1, *latent_shape(int(side))))
        assert counter.get_total_flops() == pytest.approx(known, rel=0.001)


def test_the_layers_that_gain_by_fp8_have_the_share_of_operations_that_a_plan_reckons_with() -> None:
    rows = dict[nn.Module, int]()
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        unet = unet_class().from_config(dict(SD2.unet))
        linear = {name: layer for name, layer in unet.named_modules() if isinstance(layer, nn.Linear)}
        for layer in linear.values():
            layer.register_forward_hook(lambda layer, inputs, _: rows.update({layer: inputs[0][..., 0].numel()}))
        text = torch.empty(1, TOKENS, SD2.unet["cross_attention_dim"])
        predict(unet, torch.empty(1, *latent_shape(256)), torch.zeros(1, dtype=torch.int64), text)
    shares = reference()["flops"]["fp8"]
    for least in map(int, shares):
        chosen = [layer for name, layer in linear.items() if gains(name, layer, least)]
        share = sum(2 * rows[layer] * layer.weight.numel() for layer in chosen) / counter.get_total_flops()
        assert share == pytest.approx(sum(s for width, s in shares.items() if int(width) >= least), abs=0.001)
