"""From noise to pictures: the sampling loop, and nothing of files, configurations or clusters.

    latents = denoise(networks, text, seeds, how)
    images = develop(networks.vae, latents)          # bytes, N × height × width × 3

`sample` does both. A picture's noise comes from its own seed, so it does not matter with which others it is drawn, or
by whom; the seed is what diffusers' pipelines take too: `torch.Generator().manual_seed(seed)`.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
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
"""The samplers by their names here: diffusers' class, and its settings."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How pictures are drawn."""

    scheduler: str = "ddim"
    steps: int = 50
    guidance_scale: float = 7.5
    """How far to go from the negative prompt's prediction through the prompt's; 1 takes the prompt's alone."""
    resolution: int = 512


@dataclass(frozen=True)
class Networks:
    """What draws. The networks stay as they are: evaluation mode, device and autocast are the caller's affair."""

    unet: Any
    """Called by `family.predict`, whatever it is wrapped in."""
    vae: Any
    schedule: Mapping[str, Any]
    """A scheduler configuration of diffusers, as `sdp.model.load.load_scheduler_config` gives it."""
    dtype: torch.dtype = torch.float32
    """Of what the U-Net is given."""


@dataclass(frozen=True)
class Text:
    """The text encoder's output."""

    prompts: Tensor
    """For each picture: N × tokens × width, on the device that draws."""
    negative: Tensor
    """For all of them: tokens × width. What guidance leads away from; the encoded empty string, if nothing else."""


def sample(networks: Networks, text: Text, seeds: Sequence[int], how: Sampling) -> NDArray[np.uint8]:
    """A picture for each prompt."""
    return develop(networks.vae, denoise(networks, text, seeds, how))


def denoise(networks: Networks, text: Text, seeds: Sequence[int], how: Sampling) -> Tensor:
    """Latents, fp32 and scaled as the U-Net sees them, of a picture for each prompt."""
    *_, latents = denoising(networks, text, seeds, how)
    return latents


def denoising(networks: Networks, text: Text, seeds: Sequence[int], how: Sampling) -> Iterator[Tensor]:
    """The same step by step: the latents after each call of the U-Net, so that something else can be done between."""
    if len(seeds) != len(text.prompts):
        raise ValueError(f"{len(text.prompts)} prompts and {len(seeds)} seeds")
    device = text.prompts.device
    scheduler = make_scheduler(networks.schedule, how.scheduler)
    scheduler.set_timesteps(how.steps, device=device)
    # On the CPU, whose numbers are the same everywhere.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    randomness = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
    guided = how.guidance_scale > 1
    context = text.prompts
    if guided:
        context = torch.cat((text.negative.to(device).expand_as(text.prompts), text.prompts))
    context = context.to(networks.dtype)
    shape = latent_shape(how.resolution)
    noise = torch.cat([torch.randn(1, *shape, generator=generator) for generator in generators])
    latents: Tensor = noise.to(device) * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        with torch.no_grad():  # not around the loop: it would hold for whoever takes a step
            seen = scheduler.scale_model_input(torch.cat((latents, latents)) if guided else latents, timestep)
            predicted = predict(networks.unet, seen.to(networks.dtype), timestep, context).float()
            if guided:
                negative, positive = predicted.chunk(2)
                predicted = negative + how.guidance_scale * (positive - negative)
            latents = scheduler.step(predicted, timestep, latents, **randomness).prev_sample
        yield latents


def develop(vae: Any, latents: Tensor) -> NDArray[np.uint8]:
    """The pictures of scaled latents."""
    with torch.no_grad():
        pixels = conventions.decode(vae, latents.to(vae.dtype))
        images: NDArray[np.uint8] = conventions.to_images(pixels).cpu().numpy()
    return images


def make_scheduler(schedule: Mapping[str, Any], name: str) -> Any:
    """One of diffusers' samplers for a model's noise schedule."""
    import diffusers

    kind_name, settings = SCHEDULERS[name]
    kind: Any = getattr(diffusers, kind_name)
    # clip_sample is for pixels and steps_offset for DDIM's and DDPM's spacing: as StableDiffusionPipeline sets them.
    wanted = {**schedule, "clip_sample": False, "steps_offset": 1, **settings}
    takes = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in wanted.items() if key in takes})


def image_seed(seed: int, address: int) -> int:
    """The seed of the picture at an address; 63 bits, so that it fits a column."""
    (word,) = np.random.SeedSequence(seed, spawn_key=(address,)).generate_state(1, np.uint64)
    return int(word) >> 1
