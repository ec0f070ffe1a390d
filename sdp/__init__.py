"""Train and fine-tune image diffusion models: download, process, train, generate, on one machine or on Kubernetes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdp.report.opened import Opened

__version__ = "0.2.0"


def open(uri: str) -> "Opened":
    """Return the dataset, run, checkpoint or evaluation at a URI: its rows, failures, metrics and pictures.

    The environment has the store's credentials and endpoint.
    """
    from sdp.report.opened import open_uri

    return open_uri(uri)


def run(job: str, config: str | Mapping[str, Any]) -> "Opened":
    """Run a job by a YAML file or its content, and return its output, which the job's summary describes.

    Like the command, it continues an output that it finds, and prints its progress. It raises `sdp.errors.SdpError`.
    """
    from sdp.report.opened import run

    return run(job, config)


def ray_dataset(uri: str, *, resolution: int = 256, holdout: float = 0.0) -> Any:
    """Return a latents dataset of `sdp process` as a Ray Dataset, for a training loop of your own.

    Its columns are `row` (the address), `latents_256` and `token_ids` or `text_embedding`, as arrays of numbers. Rows
    that are taken down, and the share `holdout` that `sdp train` holds out, are left out. The environment has the
    store's credentials and endpoint.
    """
    from sdp.train.ray_data import ray_dataset

    return ray_dataset(uri, resolution=resolution, holdout=holdout)
