"""The U-Net's linear layers in fp8, by torchao: checks of the hardware, and the choice of layers.

Weights, gradients, moving average and checkpoints are as without fp8: in fp32, under the same names. A layer rounds the
operands of its products (weights and inputs to e4m3, gradients to e5m2), each tensor by a scale that is computed anew
each time, and returns bf16.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from sdp.config import TrainConfig
from sdp.config.train import Fp8Config
from sdp.errors import UserError
from sdp.hardware import FP8_CAPABILITY, GPUS, Gpu, gpus_by_accelerator
from sdp.model.family import FEW_ROWS, TIMESTEP, latent_shape

_KEY = "strategy.fp8.enabled"
_EMULATE = "set strategy.fp8.emulate to try it there, slowly, or enabled to false"
_TILE = 16
"""Each side of an fp8 matrix must be a multiple of this."""


def require_fp8(config: TrainConfig) -> None:
    """Raise a UserError if fp8 is enabled and torchao or scaling.accelerator is known to lack it."""
    if not config.strategy.fp8.enabled:
        return
    require_torchao(_KEY, "true", "false")
    if (accelerator := config.scaling.accelerator) is not None:
        _refuse_types(config, "scaling.accelerator", [accelerator])


def refuse_cluster(config: TrainConfig, types: Iterable[str], gpus: float) -> None:
    """Raise a UserError if no node's accelerator type has fp8 and the configuration names none."""
    scaling = config.scaling
    if config.strategy.fp8.emulate or scaling.can_grow or scaling.accelerator is not None:
        return
    if not gpus:
        raise _no_fp8("a cluster without GPUs", _EMULATE)
    _refuse_types(config, "the cluster's GPUs", sorted(types))


def convert(unet: nn.Module, how: Fp8Config, resolution: int, device: torch.device) -> int:
    """Replace the layers that are faster in fp8 by torchao's; return their number.

    This must come before the model is compiled or wrapped, since both inspect its layers.
    """
    if not how.emulate:
        _require_device(device)
    require_torchao(_KEY, "true", "false")
    linear = [(name, layer) for name, layer in unet.named_modules() if isinstance(layer, nn.Linear)]
    chosen = {name for name, layer in linear if gains(name, layer, how.min_features)}
    if not chosen:
        suitable = [layer for name, layer in linear if gains(name, layer, _TILE)]
        widest = max((min(layer.in_features, layer.out_features) for layer in suitable), default=0)
        raise UserError(
            f"strategy.fp8.min_features: expected at most {widest}, the widest of this U-Net's linear layers, got "
            f"{how.min_features}; lower it, or set {_KEY} to false"
        )
    torchao: Any = import_module("torchao.float8")
    torchao.convert_to_float8_training(
        unet,
        module_filter_fn=lambda _, name: name in chosen,
        config=torchao.Float8LinearConfig(emulate=how.emulate, pad_inner_dim=_ragged(unet, resolution)),
    )
    return len(chosen)


def gains(name: str, layer: nn.Linear, least: int) -> bool:
    """Return whether fp8 saves a layer more than casting costs: wide on both sides, in whole tiles, with many rows.

    Few rows pass through the timestep's layers (one per picture) and the text's keys and values.
    """
    sides = (layer.in_features, layer.out_features)
    return (
        min(sides) >= least
        and not any(side % _TILE for side in sides)
        and TIMESTEP not in name
        and not name.endswith(FEW_ROWS)
    )


def _ragged(unet: nn.Module, resolution: int) -> bool:
    """Return whether the smallest feature map is no multiple of a tile, so that torchao has to pad batches."""
    config: Any = unet.config
    side = latent_shape(resolution)[-1] >> (len(config.block_out_channels) - 1)
    return side * side % _TILE > 0


def require_torchao(key: str, value: str, other: str) -> None:
    """Raise a UserError if torchao is missing, which a key's `value` needs and `other` does not."""
    if find_spec("torchao") is None:
        raise UserError(
            f"{key}: {value} needs torchao, which is not installed; pip install 'torchao>=0.18,<1' (in the image, "
            f"if the job runs on a cluster), or set it to {other}"
        )


def _require_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise _no_fp8(f"a {device.type.upper()}", _EMULATE)
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise _no_fp8(f"{torch.cuda.get_device_name(device)} ({_dotted(capability)})", "set it to false")


def _refuse_types(config: TrainConfig, where: str, types: Sequence[str]) -> None:
    """Raise a UserError if all GPUs that the types may mean are known, and none has fp8."""
    gpus = [gpus_by_accelerator(name) for name in types]
    if (
        config.strategy.fp8.emulate
        or not all(gpus)
        or not gpus
        or any(g.has_fp8 for candidates in gpus for g in candidates)
    ):
        return
    listed = ", ".join(f"{name} ({_capability(candidates)})" for name, candidates in zip(types, gpus, strict=True))
    raise _no_fp8(f"{where} {listed}", "choose another, or set it to false")


def _no_fp8(got: str, hint: str) -> UserError:
    having = ", ".join(gpu.name for gpu in GPUS.values() if gpu.has_fp8)
    wanted = f"a GPU of compute capability {_dotted(FP8_CAPABILITY)} or higher ({having})"
    return UserError(f"{_KEY}: expected {wanted}, got {got}; {hint}")


def _capability(gpus: Iterable[Gpu]) -> str:
    return _dotted(max(gpu.compute_capability for gpu in gpus))


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
