"""Settings of crops and encoders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TEXT = 0
"""The text encoder's key in mappings by resolution."""
TEXT_BATCH = 64
"""Captions per batch, if the settings name no number."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that decide an image's crops, and so the output."""

    resolutions: tuple[int, ...]
    crop: Literal["center", "random", "buckets"] = "center"
    seed: int = 0
    max_upscale: float = 2.0


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The settings of an encoder."""

    seed: int = 0
    content: Literal["sample", "moments"] = "sample"
    dtype: str = "fp32"
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    """Images per batch, by resolution; captions under TEXT."""
    compile: bool = False
