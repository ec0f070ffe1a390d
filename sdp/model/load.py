"""Load the parts of a model from a folder in diffusers layout: the same code for Stable Diffusion v2 and the tiny one.

Networks that are not trained come frozen and in evaluation mode. A weight that a file lacks is an error: the
libraries would otherwise leave it at random and say so in a log at most.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sdp.errors import ModelError, one_line
from sdp.model.family import TOKEN_DTYPE, TOKENS, unet_class

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

    from sdp.model.schedule import NoiseSchedule

# Where torchao is installed (strategy.fp8), diffusers loads it along with itself, and each time three lines would warn
# of what nobody here can mend.
for _name in ("torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def load_vae(path: Path, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu") -> "AutoencoderKL":
    """The VAE, frozen."""
    from diffusers import AutoencoderKL

    vae: AutoencoderKL = _frozen(_diffusers(AutoencoderKL, path, "vae", dtype), device)
    return vae


def load_text_encoder(
    path: Path, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu"
) -> "CLIPTextModel":
    """The text encoder, frozen; `family.encode_text` applies it."""
    import torch
    from transformers import CLIPTextModel
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar  # hundreds of workers would each draw one into their logs
    quiet()
    folder = path / "text_encoder"

    kind: Any = CLIPTextModel

    def read() -> Loaded:
        return kind.from_pretrained(
            folder, dtype=dtype or torch.float32, use_safetensors=True, output_loading_info=True
        )

    encoder: CLIPTextModel = _frozen(whole(read, folder), device)
    return encoder


def new_text_encoder(path: Path) -> "CLIPTextModel":
    """Return a text encoder with new weights, to look at what layers it has."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig.from_pretrained(path / "text_encoder"))


def load_tokenizer(path: Path) -> "CLIPTokenizer":
    """The tokenizer; `tokenize` applies it."""
    from transformers import CLIPTokenizer

    folder = path / "tokenizer"
    try:
        tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder)
    except Exception as error:  # the library beneath raises nothing more special
        raise ModelError(f"{folder}: not a CLIP tokenizer ({_line(error)}); compare with the original") from error
    return tokenizer


def tokenize(tokenizer: "CLIPTokenizer", captions: Sequence[str]) -> npt.NDArray[np.uint16]:
    """Token ids of captions, cut and padded to 77 each with the tokenizer's own padding."""
    encoded = tokenizer(list(captions), padding="max_length", max_length=TOKENS, truncation=True, return_tensors="np")
    ids: npt.NDArray[np.uint16] = encoded["input_ids"].astype(TOKEN_DTYPE)
    return ids


def load_unet(
    path: Path,
    *,
    pretrained: bool,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str" = "cpu",
) -> "UNet2DConditionModel":
    """The U-Net, ready to train: with the weights of the source, or new ones by torch's seed as it stands."""
    import torch

    kind = unet_class()
    unet = _diffusers(kind, path, "unet", dtype) if pretrained else kind.from_config(load_unet_config(path))
    # torch's own: that of diffusers warns on the terminal whenever a type is named.
    ready: UNet2DConditionModel = torch.nn.Module.to(unet, device, dtype or torch.float32).train()
    return ready


def load_unet_config(path: Path) -> dict[str, Any]:
    """The U-Net's configuration, without its weights."""
    folder = path / "unet"
    try:
        config: dict[str, Any] = unet_class().load_config(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no configuration of a U-Net ({_line(error)}); see config.json") from error
    return config


def load_noise_schedule(path: Path) -> "NoiseSchedule":
    """The noise schedule that the model was, or is to be, trained with."""
    from diffusers import DDPMScheduler

    from sdp.model.schedule import from_alphas_cumprod

    kind: Any = DDPMScheduler
    config = load_scheduler_config(path)
    try:
        known = kind.from_config({**config, "_class_name": "DDPMScheduler", "rescale_betas_zero_snr": False})
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{path}/scheduler: not a noise schedule ({_line(error)})") from error
    return from_alphas_cumprod(known.alphas_cumprod, zero_terminal_snr=bool(config.get("rescale_betas_zero_snr")))


def load_scheduler_config(path: Path) -> dict[str, Any]:
    """What a sampler of diffusers is made from; its `prediction_type` says what the model predicts."""
    from diffusers import DDPMScheduler

    kind: Any = DDPMScheduler
    folder = path / "scheduler"
    try:
        config: dict[str, Any] = kind.load_config(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no noise schedule ({_line(error)}); see scheduler_config.json") from error
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"{folder}: prediction_type: expected epsilon or v_prediction, got {prediction!r}; take another model"
        )
    return config


Loaded = Any
"""A network, and what its library tells of the loading: two values."""


def _diffusers(kind: Any, path: Path, part: str, dtype: "torch.dtype | None") -> Any:
    import torch

    folder = path / part

    def read() -> Loaded:
        return kind.from_pretrained(
            folder,
            torch_dtype=dtype or torch.float32,
            use_safetensors=True,
            low_cpu_mem_usage=False,  # True needs another library, and warns where that is missing
            output_loading_info=True,
        )

    return whole(read, folder)


def whole(read: Callable[[], Loaded], folder: Path) -> Any:
    """A network from a file that had all of its weights, in the right shapes, and no others."""
    from safetensors import SafetensorError

    try:
        model, told = read()
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be loaded ({_line(error)}); compare with the original") from error
    # Old files hold the positions' numbers too, which are no weights.
    extra = [name for name in told["unexpected_keys"] if not name.endswith("position_ids")]
    for what, names in (("missing", told["missing_keys"]), ("mismatched", told["mismatched_keys"]), ("extra", extra)):
        if names:
            raise ModelError(
                f"{folder}: {len(names)} weights are {what}, such as {min(map(str, names))}; its config.json "
                "belongs to other weights"
            )
    return model


def _frozen(model: Any, device: "torch.device | str") -> Any:
    return model.to(device).eval().requires_grad_(False)


def _line(error: Exception) -> str:
    return one_line(error, 200)
