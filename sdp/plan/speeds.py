"""The speed of one GPU in training or encoding: published, or estimated from a published figure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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

    strategy: str = "ddp"
    """ddp or fsdp, with `+compile` if compiled."""

    def train(self, gpu: str, resolution: int) -> Figure:
        """Return the speed of a trainer that never waits for data."""
        kind = self.strategy.removesuffix("+compile")
        table = reference()["training"]
        for candidate, strategy in ((gpu, self.strategy), (gpu, kind), ("A100-80G", self.strategy), ("A100-80G", kind)):
            if rows := [r for r in table if r["gpu"] == candidate and r.get("strategy") == strategy]:
                break
        named = [
            {**r, "source": f"table {r['table']}, {r['column']}", "img_per_s": r["img_per_s"] / r["gpus"]} for r in rows
        ]
        return _nearest(named, gpu, resolution, unet_flops)

    def encode(self, gpu: str, resolution: int) -> Figure:
        """Return the speed of an encoder: the VAE and the text encoder."""
        table = reference()["encoding"]
        rows = [r for r in table if r["gpu"] == gpu] or [r for r in table if r["gpu"] == "A100-80G"]
        return _nearest(rows, gpu, resolution, encoder_flops)

    def collocated(self, gpu: str, resolution: int) -> Figure:
        """Return the speed of a GPU that encodes a batch and then trains on it."""
        train, encode = self.train(gpu, resolution), self.encode(gpu, resolution)
        return Figure(1 / (1 / train.value + 1 / encode.value), f"{train.source}; encoders: {encode.source}")


def _nearest(rows: list[dict[str, Any]], gpu: str, resolution: int, flops: Callable[[int], float]) -> Figure:
    """Return the figure for the nearest resolution, scaled by operations; one of another GPU is also scaled by peak."""
    row = min(rows, key=lambda row: abs(math.log(row["resolution"] / resolution)))
    value, source = row["img_per_s"], f"published, {row['source']}"
    if row["resolution"] != resolution:
        value *= flops(row["resolution"]) / flops(resolution)
        source = f"estimate by operations from {row['resolution']} px, {source}"
    if row["gpu"] != gpu:
        value *= GPUS[gpu].peak_flops / GPUS[row["gpu"]].peak_flops
        source = f"estimate at the share of peak of {row['gpu']}, {source}"
    return Figure(value, source)


def unet_flops(resolution: int) -> float:
    """Return the operations of the U-Net's forward and backward pass for one image."""
    return _power(reference()["flops"]["unet"], resolution)


def text_flops() -> float:
    """Return the operations of the text encoder for one caption."""
    return float(reference()["flops"]["text"])


def encoder_flops(resolution: int) -> float:
    """Return the operations of both encoders for one image."""
    return _power(reference()["flops"]["vae"], resolution) + text_flops()


def _power(known: Mapping[str, float], resolution: int) -> float:
    """Return the value at a resolution on the power law through those at 256 and 512 px."""
    return float(known["256"] * (known["512"] / known["256"]) ** math.log2(resolution / 256))
