"""How much arithmetic a sample costs: counted, on torch's meta device, from the architecture itself."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def unet_flops(architecture: dict[str, Any], resolution: int) -> float:
    """Floating-point operations of the U-Net's forward and backward pass for one sample (a multiply-add is two)."""
    from diffusers import UNet2DConditionModel

    kind: Any = UNet2DConditionModel
    side = resolution // 8
    with torch.device("meta"):
        unet = kind.from_config(architecture)
        inputs = torch.empty(1, unet.config.in_channels, side, side)
        text = torch.empty(1, 77, unet.config.cross_attention_dim)
        timesteps = torch.zeros(1, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            unet(inputs, timesteps, text, return_dict=False)[0].sum().backward()
    return float(counter.get_total_flops())
