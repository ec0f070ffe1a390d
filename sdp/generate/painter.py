"""Loaded networks that turn prompts into pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.device import DTYPES, BatchLimit, choose_device, configure_torch
from sdp.generate.sample import SamplerNetworks, Sampling, Text, denoise, develop
from sdp.generate.source import GenerateModel
from sdp.model import load, sources
from sdp.model.family import encode_text
from sdp.model.trained import load_networks, load_trained
from sdp.storage import StorageOptions

Picture = NDArray[np.uint8]


@dataclass
class Painter:
    """Draws pictures for prompts."""

    networks: SamplerNetworks
    encode: Callable[[Sequence[str]], Tensor]
    """Returns the prompts' embeddings, on the device."""
    sampling: Sampling
    negative_prompt: str = ""
    limit: BatchLimit = field(default_factory=lambda: BatchLimit(8))

    def paint(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Picture | None]:
        """Return a picture for each prompt, by its seed; None where the networks returned NaN or infinity."""
        single = (
            f"resolution: no memory for a single picture of {self.sampling.resolution} pixels; lower it, or choose a "
            "larger GPU (scaling.accelerator)"
        )
        batches = self.limit.run(lambda at: self._paint(prompts[at], seeds[at]), len(prompts), single)
        return [picture for pictures in batches for picture in pictures]

    def _paint(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Picture | None]:
        negative, *positive = self.encode([self.negative_prompt, *prompts])
        text = Text(torch.stack(positive), negative)
        latents = denoise(self.networks, text, seeds, self.sampling)
        finite = latents.isfinite().flatten(1).all(1)
        images = iter(develop(self.networks.vae, latents[finite]) if finite.any() else ())
        return [next(images) if good else None for good in finite.tolist()]


def load_painter(
    model: GenerateModel,
    sampling: Sampling,
    *,
    negative_prompt: str = "",
    batch_size: int = 8,
    precision: str = "fp32",
    options: StorageOptions | None = None,
) -> Painter:
    """Load the model's networks on this process's GPU, if it has one, and return a painter."""
    device = choose_device()
    configure_torch(fixed_shapes=True)
    dtype = DTYPES[precision] if device.type == "cuda" else torch.float32
    path = sources.resolve(model.base, storage=options).path
    if model.checkpoint is None:
        trained = load_networks(path, text_encoder=False)
    else:
        trained = load_trained(model.checkpoint, path, ema=model.ema, name=str(model.base))
    trained = trained.eval().requires_grad_(False).to(device, dtype)
    text_encoder = trained.text_encoder or load.load_text_encoder(path, dtype=dtype, device=device)
    schedule = {**load.load_scheduler_config(path), **model.scheduler}
    networks = SamplerNetworks(trained.unet, load.load_vae(path, device=device), schedule, dtype)
    encode = text_encoding(path, text_encoder, device)
    return Painter(networks, encode, sampling, negative_prompt, BatchLimit(batch_size))


def text_encoding(path: Path, text_encoder: Any, device: torch.device) -> Callable[[Sequence[str]], Tensor]:
    """Return a function that encodes prompts with a model's tokenizer and this text encoder, which is on the device."""
    tokenizer = load.load_tokenizer(path)

    def encode(prompts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return encode_text(text_encoder, load.token_ids(tokenizer, prompts).to(device))

    return encode
