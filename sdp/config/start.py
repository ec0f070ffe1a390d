"""Configurations to begin with, on a laptop and on a cluster: the keys that matter first, with values that work."""

from collections.abc import Mapping
from typing import Any

LAPTOP: Mapping[str, Mapping[str, Any]] = {
    "download": {
        "source.uri": "{source}",
        "source.url_column": "url",
        "source.caption_column": "caption",
        "output.uri": "{store}/images",
        "image.size": 128,
    },
    "process": {
        "source.uri": "{pictures}",
        "source.caption": None,
        "output.uri": "{store}/latents",
        "model.source": "builtin:tiny",
        "resolutions": [64],
    },
    "train": {
        "source.uri": "{store}/latents",
        "output.uri": "{store}/run",
        "model.source": "builtin:tiny",
        "data.resolution": 64,
        "data.batch_size": 16,
        "data.holdout": 0.1,
        "max_steps": 300,
        "optimizer.learning_rate": 2e-3,
        "optimizer.warmup_steps": 20,
        "ema.decay": 0.99,
        "precision": "fp32",
        "scaling.in_driver": True,
    },
    "generate": {
        "prompts": ["a red circle on a white background"],
        "output.uri": "{store}/pictures",
        "checkpoint": "{store}/run",
        "resolution": 64,
        "sampler.steps": 20,
        "sampler.guidance_scale": 2.0,
    },
    "evaluate": {"output.uri": "{store}/evaluation", "loss.checkpoint": "{store}/run"},
}

CLUSTER: Mapping[str, Mapping[str, Any]] = {
    "download": {**LAPTOP["download"], "image.size": 512},
    "process": {
        **LAPTOP["process"],
        "model.source": "{store}/stable-diffusion-2-base",
        "resolutions": [256, 512],
        "encode.num_workers": 8,
        "encode.accelerator": "A10G",
    },
    "train": {
        "source.uri": "{store}/latents",
        "output.uri": "{store}/run",
        "model.source": "{store}/stable-diffusion-2-base",
        "data.resolution": 256,
        "data.batch_size": 64,
        "data.global_batch_size": 2048,
        "data.holdout": 0.001,
        "strategy.kind": "fsdp",
        "strategy.compile": True,
        "scaling.num_workers": 32,
        "scaling.accelerator": "A100",
    },
    "generate": {
        **LAPTOP["generate"],
        "resolution": 256,
        "sampler.steps": 25,
        "sampler.guidance_scale": 7.5,
        "scaling.num_workers": 4,
        "scaling.accelerator": "A10G",
    },
    "evaluate": {**LAPTOP["evaluate"], "scaling.num_workers": 1, "scaling.accelerator": "A10G"},
}
