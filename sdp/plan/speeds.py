"""The speed of one GPU in training or encoding: published, or estimated from a published figure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdp.config import JobConfig, TrainConfig
from sdp.hardware import GPUS
from sdp.plan.prices import reference


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Speeds:
    """Images per second of one GPU."""

    strategy: str
    """ddp or fsdp, with `+compile` if compiled."""

    def train(self, gpu: str, resolution: int) -> Figure:
        """Return the speed of a trainer that never waits for data."""
        kind = self.strategy.removesuffix("+compile")
        table = reference()["training"]
        for candidate, strategy in ((gpu, self.strategy), (gpu, kind), ("A100-80G", self.strategy), ("A100-80G", kind)):
            rows = [r for r in table if r["gpu"] == candidate and r.get("strategy") == strategy]
            if rows:
                break
        named = [
            dict(
                row, source=f"published, table {row['table']}, {row['column']}", per_gpu=row["img_per_s"] / row["gpus"]
            )
            for row in rows
        ]
        return _nearest(named, gpu, resolution, unet_flops)

    def encode(self, gpu: str, resolution: int) -> Figure:
        """Return the speed of an encoder: the VAE and the text encoder."""
        rows = [
            dict(row, per_gpu=row["img_per_s"], source=f"published, {row['source']}") for row in reference()["encoding"]
        ]
        rows = [row for row in rows if row["gpu"] == gpu] or [row for row in rows if row["gpu"] == "A100-80G"]
        return _nearest(rows, gpu, resolution, encoder_flops)

    def collocated(self, gpu: str, resolution: int) -> Figure:
        """Return the speed of a GPU that encodes a batch and then trains on it."""
        train, encode = self.train(gpu, resolution), self.encode(gpu, resolution)
        return Figure(1 / (1 / train.value + 1 / encode.value), f"{train.source}; encoders: {encode.source}")


def _nearest(rows: list[dict[str, Any]], gpu: str, resolution: int, flops: Any) -> Figure:
    """Return the figure for the nearest resolution, scaled by operations; one of another GPU is also scaled by peak."""
    row = min(rows, key=lambda row: abs(math.log(row["resolution"] / resolution)))
    value, source = row["per_gpu"], row["source"]
    if row["resolution"] != resolution:
        value *= flops(row["resolution"]) / flops(resolution)
        source = f"estimate by operations from {row['resolution']} px, {source}"
    if row["gpu"] != gpu:
        value *= GPUS[gpu].peak_flops / GPUS[row["gpu"]].peak_flops
        source = f"estimate at the share of peak of {row['gpu']}, {source}"
    return Figure(value, source)


def speeds_of(config: JobConfig) -> Speeds:
    """Return the speeds of a job's strategy."""
    strategy = config.strategy.kind + "+compile" * config.strategy.compile if isinstance(config, TrainConfig) else "ddp"
    return Speeds(strategy)


def unet_flops(resolution: int) -> float:
    """Return the operations of the U-Net's forward and backward pass for one image."""
    return _power(reference()["flops"]["unet"], resolution)


def encoder_flops(resolution: int) -> float:
    """Return the operations of both encoders for one image."""
    return _power(reference()["flops"]["vae"], resolution) + float(reference()["flops"]["text"])


def _power(known: Mapping[str, float], resolution: int) -> float:
    """Return the value at a resolution on the power law through those at 256 and 512 px."""
    return float(known["256"] * (known["512"] / known["256"]) ** math.log2(resolution / 256))
