"""The configurations of Stable Diffusion 2's VAE and sampler as published, for benchmarks, tests and tiny models."""

from collections.abc import Mapping
from typing import Any

from sdp.families import LatentSpace

VAE: Mapping[str, Any] = {
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": LatentSpace().channels,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 768,
    "scaling_factor": LatentSpace().scale,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}

SCHEDULER: Mapping[str, Any] = {
    "_class_name": "DDIMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
