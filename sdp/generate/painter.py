"""Networks that turn prompts into pictures."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.config.generate import GenerateConfig, SamplerConfig
from sdp.device import DTYPES, BatchLimit, choose_device, configure_torch, share_cores
from sdp.families import Family, latent_space, of
from sdp.families.tokenizer import load_tokenizer, token_ids
from sdp.generate.sample import make_scheduler
from sdp.generate.source import GenerateModel
from sdp.model import load, sources
from sdp.model.latents import decode, to_images
from sdp.model.trained import load_networks, load_trained

Picture = NDArray[np.uint8]
"""Height × width × 3."""


@dataclass
class Painter:
    """Draws pictures for prompts; the networks are in evaluation mode on one device.

    A picture's noise comes from its own seed, so it does not depend on the batch or the process that draws it. Seeds
    are those of diffusers' pipelines: `torch.Generator().manual_seed(seed)`.
    """

    family: Family
    denoiser: Any
    """Called by the family's `predict`."""
    vae: Any
    encode: Callable[[Sequence[str]], Tensor]
    """Returns the prompts' embeddings, on the device."""
    schedule: Mapping[str, Any]
    """A scheduler configuration of diffusers, from `sdp.model.load.load_scheduler_config`."""
    sampler: SamplerConfig
    resolution: int
    dtype: torch.dtype
    """The dtype of the denoiser's inputs; the sampler computes in fp32."""
    limit: BatchLimit

    @torch.no_grad()
    def paint(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Picture | None]:
        """Return a picture for each prompt, by its seed; None where the networks returned NaN or infinity."""
        too_large = (
            f"resolution: no memory for a single picture of {self.resolution} pixels; lower it, or choose a "
            "larger GPU (scaling.accelerator)"
        )
        batches = self.limit.run(lambda at: self._paint(prompts[at], seeds[at]), len(prompts), too_large)
        return [picture for pictures in batches for picture in pictures]

    def _paint(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Picture | None]:
        latents = self._denoise(self.encode([self.sampler.negative_prompt, *prompts]), seeds)
        finite = latents.isfinite().flatten(1).all(1)
        if not finite.any():
            return [None] * len(seeds)
        images = iter(to_images(decode(self.vae, latents[finite])).cpu().numpy())
        return [next(images) if good else None for good in finite.tolist()]

    def _denoise(self, text: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return each picture's latents, in fp32 and with the denoiser's scale, by the embeddings of all prompts."""
        sampler, device = self.sampler, text.device
        scheduler = make_scheduler(self.schedule, sampler.scheduler)
        # On the CPU, where the numbers are the same on every machine.
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        randomness = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
        negative, context = text[:1], text[1:]
        guided = sampler.guidance_scale > 1
        if guided:
            context = torch.cat((negative.expand_as(context), context))
        context = context.to(self.dtype)
        shape = latent_space(self.vae.config).shape(self.resolution)
        noise = torch.cat([torch.randn(1, *shape, generator=generator) for generator in generators]).to(device)
        self.family.set_timesteps(scheduler, sampler.steps, noise)
        latents: Tensor = noise * getattr(scheduler, "init_noise_sigma", 1.0)  # a flow has none
        scale = getattr(scheduler, "scale_model_input", lambda latents, _: latents)
        for timestep in scheduler.timesteps:
            inputs = scale(torch.cat((latents, latents)) if guided else latents, timestep)
            predicted = self.family.predict(self.denoiser, inputs.to(self.dtype), timestep, context).float()
            if guided:
                unwanted, wanted = predicted.chunk(2)
                predicted = unwanted + sampler.guidance_scale * (wanted - unwanted)
            latents = scheduler.step(predicted, timestep, latents, **randomness).prev_sample
        return latents


def load_painter(model: GenerateModel, config: GenerateConfig) -> Painter:
    """Load the model's networks on this process's GPU, if it has one, and return a painter."""
    device = choose_device()
    configure_torch(fixed_shapes=True)
    dtype = DTYPES[config.precision] if device.type == "cuda" else torch.float32
    path = sources.resolve(model.base, storage=config.storage.options()).path
    if model.checkpoint is None:
        trained = load_networks(path, text_encoder=False)
    else:
        trained = load_trained(model.checkpoint, path, ema=model.ema, name=str(model.base))
    trained = trained.eval().requires_grad_(False).to(device, dtype)
    share_cores(device, trained)
    distilled = sources.is_distilled(str(path))
    return Painter(
        family=trained.family,
        denoiser=trained.denoiser,
        vae=load.load_vae(path, device=device),
        encode=text_encoding(path, trained.text_encoder or load.load_text_encoder(path, dtype, device), device),
        schedule={**load.load_scheduler_config(path), **model.scheduler},
        sampler=config.sampler.replaced(guidance_scale=1.0) if distilled else config.sampler,
        resolution=config.resolution,
        dtype=dtype,
        limit=BatchLimit(config.scaling.batch_size),
    )


def text_encoding(path: Path, text_encoder: Any, device: torch.device) -> Callable[[Sequence[str]], Tensor]:
    """Return a function that encodes prompts with a model's tokenizer and this text encoder, which is on the device."""
    tokenizer, family = load_tokenizer(path), of(path)

    @torch.no_grad()
    def encode(prompts: Sequence[str]) -> Tensor:
        return family.encode_text(text_encoder, token_ids(tokenizer, prompts).to(device))

    return encode
