"""diffusers' samplers by name, and the seed of each picture."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdp.model.layout import FLOW

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


def make_scheduler(schedule: Mapping[str, Any], name: str) -> Any:
    """Return one of diffusers' samplers for a model's noise schedule; a flow has one."""
    import diffusers

    kind_name, settings = (FLOW, {}) if schedule.get("_class_name") == FLOW else SCHEDULERS[name]
    kind: Any = getattr(diffusers, kind_name)
    # As StableDiffusionPipeline sets them: clip_sample is for pixels, steps_offset for DDIM's and DDPM's spacing.
    options = {**schedule, "clip_sample": False, "steps_offset": 1, **settings}
    parameters = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in options.items() if key in parameters})


def image_seed(seed: int, address: int) -> int:
    """Return the seed of an address's picture, of 63 bits to fit an int64 column."""
    (word,) = np.random.SeedSequence(seed, spawn_key=(address,)).generate_state(1, np.uint64)
    return int(word) >> 1
