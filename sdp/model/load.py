"""Loading the parts of a model from a folder in diffusers layout.

Networks that are not trained are frozen and in evaluation mode. A missing weight is an error, since the libraries would
leave it random with at most a log line.
"""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp import families
from sdp.errors import ModelError, one_line
from sdp.families import explained
from sdp.families.classes import network_class
from sdp.model.layout import json_object, prediction_type

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    Device = torch.device | str

    from sdp.model.schedule import NoiseSchedule


def load_vae(path: Path, device: "Device" = "cpu") -> Any:
    """Load the VAE, frozen."""
    kind = _config(path / "vae/config.json").get("_class_name", "AutoencoderKL")
    return _frozen(_diffusers(network_class(kind), path, "vae"), device)


def load_text_encoder(path: Path, dtype: "torch.dtype | None" = None, device: "Device" = "cpu") -> "PreTrainedModel":
    """Load the text encoder, frozen. Its family's `encode_text` runs it."""
    encoder: PreTrainedModel = load_network(_text_class(path), path / "text_encoder", device, dtype=dtype)
    families.of(path).prepare_text_encoder(encoder, path)
    return encoder


def load_network(kind: Any, path: Path, device: "Device" = "cpu", **options: Any) -> Any:
    """Load a network of transformers, frozen; in fp32 unless the options name a dtype."""
    import torch
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar  # hundreds of workers would each log one
    quiet()
    return _frozen(_complete(kind, path, **{**options, "dtype": options.get("dtype") or torch.float32}), device)


def new_text_encoder(path: Path) -> "PreTrainedModel":
    """Return a text encoder with new weights, to inspect its layers."""
    kind = _text_class(path)
    encoder: PreTrainedModel = kind(kind.config_class.from_pretrained(path / "text_encoder"))
    return encoder


def _text_class(path: Path) -> Any:
    import transformers

    return getattr(transformers, families.of(path).text_class)


def load_denoiser(
    path: Path, *, pretrained: bool, device: "Device" = "cpu", matrices: "torch.dtype | None" = None
) -> Any:
    """Load the denoiser for training, with the source's weights or with new ones from torch's current seed.

    Its matrices are in fp32 or the given dtype, all else is in fp32.
    """
    import torch

    family = families.of(path)
    kind, folder = network_class(family.denoiser_class), path / family.denoiser
    if pretrained:
        denoiser = _diffusers(kind, path, family.denoiser)
    else:
        config = load_denoiser_config(path)
        with explained(folder):
            denoiser = kind.from_config(config)
            family.initialise(denoiser)
    # torch's own `to`, since that of diffusers warns whenever a dtype is passed.
    denoiser = torch.nn.Module.to(denoiser, torch.float32)
    if matrices:
        for weights in denoiser.parameters():
            if weights.dim() > 1:
                weights.data = weights.data.to(matrices)
    return denoiser.to(device).train()


def load_denoiser_config(path: Path) -> dict[str, Any]:
    """Load the denoiser's configuration."""
    return _config(path / families.of(path).denoiser / "config.json")


def load_noise_schedule(path: Path) -> "NoiseSchedule":
    """Load the noise schedule that the model is trained with."""
    from diffusers import DDPMScheduler

    from sdp.model.schedule import from_alphas_cumprod

    kind: Any = DDPMScheduler
    config = load_scheduler_config(path)
    try:
        scheduler = kind.from_config({**config, "_class_name": "DDPMScheduler", "rescale_betas_zero_snr": False})
    except (ValueError, TypeError, RuntimeError) as error:
        line = one_line(error, 200)
        raise ModelError(f"{path}/scheduler: not a noise schedule ({line}); check scheduler_config.json") from error
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
        raise ModelError(f"{file}: not a configuration ({one_line(error, 200)}); restore it") from error


def _diffusers(kind: Any, path: Path, part: str) -> Any:
    import torch

    # low_cpu_mem_usage=True needs another library, and warns if that is missing.
    return _complete(kind, path / part, torch_dtype=torch.float32, low_cpu_mem_usage=False)


def _hub_kernel(config: Any) -> str | None:
    """Return a key, at any depth, by which transformers would load code of the model hub."""
    ahead = [config]
    while ahead:
        value = ahead.pop()
        if isinstance(value, dict):
            for name, inner in value.items():
                if "attn_implementation" in name and "/" in str(inner):
                    return str(name)
            ahead += value.values()
        elif isinstance(value, list):
            ahead += value
    return None


_REPORTERS = (
    "diffusers.models.modeling_utils",
    "transformers.modeling_utils",
    "transformers.distributed.tensor_parallel",
)
"""The loggers that would list weights that do not fit on many lines."""


def _complete(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a network, whose file must have exactly its weights, in the right shapes."""
    from safetensors import safe_open

    for index in folder.glob("*.safetensors.index.json"):  # the libraries would read the pickles that it names
        weights = _config(index).get("weight_map")
        files = map(str, weights.values()) if isinstance(weights, dict) else ()
        if not all(re.fullmatch(r"[\w.-]+\.safetensors", file) for file in files):
            raise ModelError(f"{index}: weight_map: expected safetensors in the same folder; restore it")
    if (folder / "adapter_config.json").exists():  # transformers would add its weights, which no digest covers
        raise ModelError(
            f"{folder}: adapter_config.json: expected a network without an adapter; merge it, or remove it"
        )
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.exists() and (name := _hub_kernel(_config(file))):
            raise ModelError(f"{file}: {name}: expected one of torch's, got code of the model hub; remove it")
    for file in folder.glob("*.safetensors"):
        if "." not in file.stem:  # another precision, which is not read
            with explained(file), safe_open(file, "pt"):  # diffusers would not say what is wrong with its header
                pass
    for logger in _REPORTERS:
        logging.getLogger(logger).setLevel(logging.ERROR)
    with explained(folder):
        model, report = kind.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    # Old files also hold the position ids, which are not weights, and those of a language model its head.
    extra = [name for name in report["unexpected_keys"] if not name.endswith(("position_ids", "lm_head.weight"))]
    for fault, names in (
        ("missing", report["missing_keys"]),
        ("of other shapes", [name for name, *_ in report["mismatched_keys"]]),
        ("extra", extra),
    ):
        if names:
            raise ModelError(
                f"{folder}: {len(names)} weights are {fault}, such as {min(map(str, names))}; restore the weights that "
                "belong to its config.json"
            )
    return model


def _frozen(model: Any, device: "Device") -> Any:
    return model.to(device).eval().requires_grad_(False)
