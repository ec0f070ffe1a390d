"""Rules for images, from the few values that a test is about."""

from typing import Any

from sdp.config.download import FiltersConfig, ImageConfig
from sdp.download.image import ImageRules


def image_rules(
    *,
    crop: bool = False,
    min_side: int | None = None,
    max_aspect: float | None = None,
    **image: Any,
) -> ImageRules:
    """Return rules that accept any size, unless overridden."""
    config = ImageConfig(**{"crop": "center" if crop else "none", **image})
    return ImageRules(config, FiltersConfig(min_side=min_side, max_aspect=max_aspect))
