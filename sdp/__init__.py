"""Pre-train Stable Diffusion: download, process, train, generate, on Ray and Kubernetes."""

from typing import Any

__version__ = "0.2.0"


def ray_dataset(uri: str, *, resolution: int = 256, holdout: float = 0.0) -> Any:
    """Return a latents dataset of `sdp process` as a Ray Dataset, for a training loop of your own.

    Its columns are `row` (the address), `latents_256` and `token_ids` or `text_embedding`, as arrays of numbers. Rows
    that are taken down, and the share `holdout` that `sdp train` holds out, are left out. The environment has the
    store's credentials and endpoint.
    """
    from sdp.train.ray_data import ray_dataset

    return ray_dataset(uri, resolution=resolution, holdout=holdout)
