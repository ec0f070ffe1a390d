"""What a model's configuration files say of its shapes, without torch: what jobs have to know before loading it."""

import json
from pathlib import Path
from typing import Any

from sdp.errors import ModelError

_DEFAULTS = {"latent_channels": 4, "scaling_factor": 0.18215, "hidden_size": 512}
"""Of the libraries that read these files: keys that were written before they had a name are absent."""


def latent_channels(model: Path) -> int:
    """Channels of the VAE's latents."""
    return int(_number(model / "vae", "latent_channels"))


def scaling_factor(model: Path) -> float:
    """What the VAE's latents are multiplied by."""
    return float(_number(model / "vae", "scaling_factor"))


def text_width(model: Path) -> int:
    """Numbers that the text encoder gives for each token."""
    return int(_number(model / "text_encoder", "hidden_size"))


def _number(folder: Path, key: str) -> float:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    value = config.get(key, _DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{folder}/config.json: {key}: expected a number above 0, got {value!r}; restore the file")
    return value
