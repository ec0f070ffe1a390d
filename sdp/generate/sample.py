"""The sampling loop from noise to pictures; no files, configurations or clusters.

    latents = denoise(networks, text, seeds, sampling)
    images = develop(networks.vae, latents)          # uint8, N × height × width × 3

A picture's noise comes from its own seed, so it does not depend on the batch or the process that
draws it. Seeds are those of diffusers' pipelines: `torch.Generator().manual_seed(seed)`.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.model import latents as conventions
from sdp.model.family import latent_shape, predict

SCHEDULERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpm++_karras": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
}
"""Samplers by name: the class of diffusers, and its settings."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the sampling loop."""

    scheduler: str = "ddim"
    steps: int = 50
    guidance_scale: float = 7.5
    """The prompt's weight against the negative prompt; 1 uses the prompt alone."""
    resolution: int = 512


@dataclass(frozen=True)
class SamplerNetworks:
    """The networks that draw. The caller sets evaluation mode, device and autocast."""

    unet: Any
    """Called by `family.predict`."""
    vae: Any
    schedule: Mapping[str, Any]
    """A scheduler configuration of diffusers, from `sdp.model.load.load_scheduler_config`."""
    dtype: torch.dtype = torch.float32
    """The dtype of the U-Net's inputs."""


@dataclass(frozen=True)
class Text:
    """The text encoder's output."""

    prompts: Tensor
    """One for each picture: N × tokens × width, on the device that draws."""
    negative: Tensor
    """The negative prompt of all pictures: tokens × width. Usually the encoded empty string."""


@torch.no_grad()
def denoise(networks: SamplerNetworks, text: Text, seeds: Sequence[int], sampling: Sampling) -> Tensor:
    """Return the latents of a picture for each prompt, in fp32 and with the U-Net's scale."""
    if len(seeds) != len(text.prompts):
        raise ValueError(f"expected a seed for each of {len(text.prompts)} prompts, got {len(seeds)}")
    device = text.prompts.device
    scheduler = make_scheduler(networks.schedule, sampling.scheduler)
    scheduler.set_timesteps(sampling.steps, device=device)
    # On the CPU, where the numbers are the same on every machine.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    randomness = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
    guided = sampling.guidance_scale > 1
    context = text.prompts
    if guided:
        context = torch.cat((text.negative.to(device).expand_as(text.prompts), text.prompts))
    context = context.to(networks.dtype)
    shape = latent_shape(sampling.resolution)
    noise = torch.cat([torch.randn(1, *shape, generator=generator) for generator in generators])
    latents: Tensor = noise.to(device) * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        inputs = scheduler.scale_model_input(torch.cat((latents, latents)) if guided else latents, timestep)
        predicted = predict(networks.unet, inputs.to(networks.dtype), timestep, context).float()
        if guided:
            negative, positive = predicted.chunk(2)
            predicted = negative + sampling.guidance_scale * (positive - negative)
        latents = scheduler.step(predicted, timestep, latents, **randomness).prev_sample
    return latents


def develop(vae: Any, latents: Tensor) -> NDArray[np.uint8]:
    """Decode scaled latents to pictures."""
    with torch.no_grad():
        pixels = conventions.decode(vae, latents.to(vae.dtype))
        images: NDArray[np.uint8] = conventions.to_images(pixels).cpu().numpy()
    return images


def make_scheduler(schedule: Mapping[str, Any], name: str) -> Any:
    """Return one of diffusers' samplers for a model's noise schedule."""
    import diffusers

    kind_name, settings = SCHEDULERS[name]
    kind: Any = getattr(diffusers, kind_name)
    # As StableDiffusionPipeline sets them: clip_sample is for pixels, steps_offset for DDIM's and DDPM's spacing.
    options = {**schedule, "clip_sample": False, "steps_offset": 1, **settings}
    parameters = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in options.items() if key in parameters})


def image_seed(seed: int, address: int) -> int:
    """Return the seed of an address's picture, of 63 bits to fit an int64 column."""
    (word,) = np.random.SeedSequence(seed, spawn_key=(address,)).generate_state(1, np.uint64)
    return int(word) >> 1
