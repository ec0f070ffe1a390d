"""Latents for training loops of your own, through Ray Data; `sdp train` has a faster reader (docs/measurements.md)."""

import os
from typing import Any

import numpy as np
import ray
import ray.data

from sdp.datasets.manifest import open_dataset
from sdp.errors import UserError
from sdp.storage import open_storage
from sdp.train.data.latents import GroupReader, open_latents
from sdp.train.data.weights import row_weights


def ray_dataset(uri: str, *, resolution: int = 256, holdout: float = 0.0) -> ray.data.Dataset:
    """Return the rows of a latents dataset to train on, decoded, in a stream of row groups; see `sdp.ray_dataset`."""
    dataset = open_dataset(open_storage(uri), "latents")
    latents, weigh = open_latents(dataset, resolution), row_weights(dataset.storage, holdout, None)
    if latents.shapes:
        raise UserError(f"{uri}: expected latents of one shape, got those of transform.crop: buckets; use sdp train")

    def load(batch: dict[str, Any]) -> dict[str, Any]:
        (group,) = batch["id"].tolist()
        rows = GroupReader(latents).rows(group)
        rows = rows[weigh(rows.rows) > 0]
        loaded = {"row": rows.rows}
        for column, values in zip(latents.columns, (rows.latents, rows.text), strict=True):
            numbers = values.view(column.dtype).reshape(len(rows), *column.shape)
            loaded[column.name] = numbers if column.dtype.kind == "f" else numbers.astype(np.int64)
        return loaded

    if not ray.is_initialized():  # Ray by itself would join, or wait for, what was last started on this machine
        ray.init(os.environ.get("RAY_ADDRESS") or "local")
    return ray.data.range(len(latents.row_groups.rows)).map_batches(load, batch_size=1)
