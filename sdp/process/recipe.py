"""How images become crops, and crops latents: what both halves of the stage are told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sdp.imaging import MAX_PIXELS

TEXT = 0
"""Stands for the text encoder where others are named by their resolution."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an image becomes crops; part of what the output is."""

    resolutions: tuple[int, ...]
    crop: Literal["center", "random", "buckets"] = "center"
    crops: int = 1
    """Crops of each image; more than one only if they are random."""
    seed: int = 0
    max_upscale: float = 2.0
    oversample: float = 1.0
    """A JPEG is decoded to at least this many times the size it is cut at."""
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True, slots=True)
class Settings:
    """How to encode."""

    seed: int = 0
    content: Literal["sample", "moments"] = "sample"
    dtype: str = "fp32"
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    """Images at once, by resolution; TEXT for captions."""
    channels_last: bool = True
    compile: bool = False
