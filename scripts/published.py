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

TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "klein-4b": {
        "_class_name": "Flux2Transformer2DModel",
        "attention_head_dim": 128,
        "axes_dims_rope": [32, 32, 32, 32],
        "guidance_embeds": False,
        "in_channels": 128,
        "joint_attention_dim": 7680,
        "num_attention_heads": 24,
        "num_layers": 5,
        "num_single_layers": 20,
    }
} | {
    name: {
        "_class_name": "PRXTransformer2DModel",
        "axes_dim": [32, 32],
        "context_in_dim": 1024,
        "depth": depth,
        "hidden_size": 64 * heads,
        "in_channels": 16,
        "mlp_ratio": 3.5,
        "num_heads": heads,
        "patch_size": 2,
    }
    for name, depth, heads in (("prx-424m", 14, 18), ("prx-1.2b", 16, 28))
}
"""FLUX.2 klein base 4B's, and PRX's in two sizes, with Qwen3-0.6B's states and a VAE of 16 channels."""

QWEN3: Mapping[str, Any] = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "pad_token_id": 151643,
    "vocab_size": 151936,
}
"""Qwen3-0.6B, PRX's text encoder."""

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
