"""What a run has learnt, as a network: its own weights, or the model's with the run's LoRA merged into them."""

from pathlib import Path
from typing import Any

import torch

from sdp.config.train import LoraConfig
from sdp.datasets.output import read_json
from sdp.errors import DatasetError, ModelError, one_line
from sdp.model import load, sources
from sdp.model.checkpoints import CONFIG, read_weights
from sdp.model.lora import add_lora, merge_lora
from sdp.model.sources import ModelSource
from sdp.storage import Storage, StorageOptions


def load_trained(checkpoint: Storage, path: Path, *, ema: bool, name: str) -> Any:
    """The U-Net of a checkpoint, by the configuration of the model (in the folder `path`) that it was trained from."""
    weights, lora = read_weights(checkpoint, ema=ema), lora_of(checkpoint)
    unet = empty_unet(path, lora)
    frozen = {n for n, weight in unet.named_parameters() if not weight.requires_grad}
    try:
        found = unet.load_state_dict(weights, strict=lora.rank is None, assign=True)
        if lost := [*found.unexpected_keys, *(set(found.missing_keys) - frozen)]:
            raise RuntimeError(f"of {len(lost)} names, such as {lost[0]}")
    except RuntimeError as error:
        cause = one_line(error, 200)
        raise ModelError(
            f"{checkpoint.uri}: not weights of the U-Net of {name} ({cause}); set model to the one that it was trained "
            "from"
        ) from error
    if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
        raise DatasetError(f"{checkpoint.uri}: has NaN or infinite weights; take an earlier checkpoint")
    merge_lora(unet)
    return unet


def empty_unet(path: Path, lora: LoraConfig) -> Any:
    """A U-Net that takes a run's weights: on torch's meta device, or the model's own with LoRA beside it."""
    if lora.rank is None:
        with torch.device("meta"):  # new weights would only be drawn to be thrown away
            return load.load_unet(path, pretrained=False, device="meta")
    unet: Any = load.load_unet(path, pretrained=True)
    add_lora(unet, lora.rank, lora.scale, lora.targets)
    return unet


def refuse_lora(lora: LoraConfig, source: str | ModelSource, options: StorageOptions) -> None:
    """UserError where a model's U-Net has no room for such a LoRA."""
    if lora.rank is not None:
        with torch.device("meta"):
            path = sources.resolve(source, storage=options).path
            unet: Any = load.load_unet(path, pretrained=False, device="meta")
            add_lora(unet, lora.rank, lora.scale, lora.targets)


def lora_of(checkpoint: Storage) -> LoraConfig:
    """What a checkpoint's run was told of LoRA."""
    return LoraConfig.model_validate(read_json(checkpoint, CONFIG).get("lora", {}), strict=False)
