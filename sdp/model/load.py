"""Loading the parts of a model from a folder in diffusers layout.

Networks that are not trained are frozen and in evaluation mode. A missing weight is an error, since the libraries would
leave it random with at most a log line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp.errors import ModelError, one_line
from sdp.model.classes import network_class
from sdp.model.family import new_unet, unet_class
from sdp.model.layout import json_object, prediction_type

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel

    from sdp.model.schedule import NoiseSchedule


def load_vae(path: Path, device: "torch.device | str" = "cpu") -> "AutoencoderKL":
    """Load the VAE, frozen."""
    vae: AutoencoderKL = _frozen(_diffusers(network_class("AutoencoderKL"), path, "vae"), device)
    return vae


def load_text_encoder(
    path: Path, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu"
) -> "CLIPTextModel":
    """Load the text encoder, frozen. `family.encode_text` runs it."""
    from transformers import CLIPTextModel

    encoder: CLIPTextModel = load_network(CLIPTextModel, path / "text_encoder", device, dtype=dtype)
    return encoder


def load_network(kind: Any, path: Path, device: "torch.device | str" = "cpu", **options: Any) -> Any:
    """Load a network of transformers, frozen; in fp32 unless the options name a dtype."""
    import torch
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar  # hundreds of workers would each log one
    quiet()
    return _frozen(_complete(kind, path, **{**options, "dtype": options.get("dtype") or torch.float32}), device)


def new_text_encoder(path: Path) -> "CLIPTextModel":
    """Return a text encoder with new weights, to inspect its layers."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig.from_pretrained(path / "text_encoder"))


def load_unet(path: Path, *, pretrained: bool, device: "torch.device | str" = "cpu") -> "UNet2DConditionModel":
    """Load the U-Net for training, with the source's weights or with new ones from torch's current seed."""
    import torch

    if pretrained:
        unet = _diffusers(unet_class(), path, "unet")
    else:
        config = load_unet_config(path)
        with _explained(path / "unet"):
            unet = new_unet(config)
    # torch's own `to`, since that of diffusers warns whenever a dtype is passed.
    ready: UNet2DConditionModel = torch.nn.Module.to(unet, device, torch.float32).train()
    return ready


def load_unet_config(path: Path) -> dict[str, Any]:
    """Load the U-Net's configuration."""
    return _config(path / "unet/config.json")


def load_noise_schedule(path: Path) -> "NoiseSchedule":
    """Load the noise schedule that the model is trained with."""
    from diffusers import DDPMScheduler

    from sdp.model.schedule import from_alphas_cumprod

    kind: Any = DDPMScheduler
    config = load_scheduler_config(path)
    try:
        scheduler = kind.from_config({**config, "_class_name": "DDPMScheduler", "rescale_betas_zero_snr": False})
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"{path}/scheduler: not a noise schedule ({_line(error)}); check scheduler_config.json"
        ) from error
    return from_alphas_cumprod(scheduler.alphas_cumprod, zero_terminal_snr=bool(config.get("rescale_betas_zero_snr")))


def load_scheduler_config(path: Path) -> dict[str, Any]:
    """Load the configuration of diffusers' samplers, which names what the model predicts."""
    file = path / "scheduler/scheduler_config.json"
    config = _config(file)
    prediction_type(config, str(file))
    return config


def _config(file: Path) -> dict[str, Any]:
    try:
        return json_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a configuration ({_line(error)}); restore it") from error


def _diffusers(kind: Any, path: Path, part: str) -> Any:
    import torch

    # low_cpu_mem_usage=True needs another library, and warns if that is missing.
    return _complete(kind, path / part, torch_dtype=torch.float32, low_cpu_mem_usage=False)


def _complete(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a network, whose file must have exactly its weights, in the right shapes."""
    with _explained(folder):
        model, report = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    # Old files also hold the position ids, which are not weights.
    extra = [name for name in report["unexpected_keys"] if not name.endswith("position_ids")]
    for fault, names in (
        ("missing", report["missing_keys"]),
        ("mismatched", report["mismatched_keys"]),
        ("extra", extra),
    ):
        if names:
            raise ModelError(
                f"{folder}: {len(names)} weights are {fault}, such as {min(map(str, names))}; restore the weights that "
                "belong to its config.json"
            )
    return model


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what the libraries raise for a damaged or odd network, which is of any class, into one line."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{folder}: cannot be loaded ({_line(error)}); compare it with the original") from error


def _frozen(model: Any, device: "torch.device | str") -> Any:
    return model.to(device).eval().requires_grad_(False)


def _line(error: Exception) -> str:
    return one_line(error, 200)
