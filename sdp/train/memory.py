"""What a trainer of Stable Diffusion 2 holds in its GPU's memory, by activity, computed without a GPU.

Saved activations are counted on fake tensors, with the real network under the strategy's arithmetic; the rest follows
from the number of parameters. Fragmentation, NCCL's buffers, cuDNN's workspaces, what torch.compile saves and the
backward pass's own temporaries are not counted: MARGIN keeps room for them. With activation checkpointing the block
that is being recomputed is not counted either, so that those figures are lower bounds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sdp.config import TrainConfig
from sdp.hardware import Gpu
from sdp.model.family import SD2, TOKENS, blocks, latent_shape, predict, unet_class
from sdp.train.strategies import DTYPES

MARGIN = 0.1
"""Share of a GPU's memory that is left for what is not counted."""
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a forward pass keeps for the backward pass."""

    per_sample: int
    fixed: int
    """Whatever the batch: low-precision copies of weights under autocast."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A trainer's memory with one strategy."""

    name: str
    parts: Mapping[str, float]
    """Bytes by activity, without activations."""
    per_sample: float
    batch: int
    gpu: Gpu

    @property
    def total(self) -> float:
        return sum(self.parts.values()) + self.per_sample * self.batch

    @property
    def fits(self) -> bool:
        return self.batch <= self.largest_batch

    @property
    def largest_batch(self) -> int:
        return max(0, int((self.gpu.memory_bytes * (1 - MARGIN) - sum(self.parts.values())) // self.per_sample))


def estimates(config: TrainConfig, gpu: Gpu, workers: int, local: int) -> list[Memory]:
    """Return the memory with the configured strategy first, then with ddp, fsdp and activation checkpointing."""
    own = (config.strategy.kind, config.strategy.activation_checkpointing)
    kinds = ("ddp", "fsdp") if config.precision != "fp16" else ("ddp",)
    choices = [own, *((kind, recompute) for kind in kinds for recompute in (False, True))]
    return [_estimate(config, gpu, workers, local, *choice) for choice in dict.fromkeys(choices)]


def _estimate(config: TrainConfig, gpu: Gpu, workers: int, local: int, kind: str, recompute: bool) -> Memory:
    count, fp32 = SD2.parameters["unet"], config.precision == "fp32"
    hybrid = kind == "fsdp" and config.strategy.shard == "hybrid"
    shards = 1 if kind == "ddp" else local if hybrid else workers
    state = _FP32 * count / shards
    kept = activations(kind, config.precision, recompute, config.data.resolution)
    half = _FP32 if fp32 else 2
    parts = {"weights": state, "gradients": state, "optimizer": 2 * state}
    if config.ema.decay is not None:
        parts["average"] = state
    if kind == "fsdp":
        whole = _largest_blocks() if config.strategy.shard == "full_shard" else count
        parts["all-gathers"] = float(half * whole)
    parts["copies for autocast"] = float(kept.fixed)
    if not config.text_encoded:
        parts["text encoder"] = float(half * SD2.parameters["text_encoder"])
    name = kind if kind == "ddp" else f"fsdp {config.strategy.shard}"
    name += ", checkpointed activations (a lower bound: without the block being recomputed)" * recompute
    return Memory(name, {k: v for k, v in parts.items() if v}, kept.per_sample, config.data.batch_size, gpu)


@cache
def activations(kind: str, precision: str, recompute: bool, resolution: int) -> Activations:
    """Count what a forward pass saves for the backward pass, assuming flash attention."""
    with FakeTensorMode(), mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _Attention.call):
        unet = _unet(DTYPES[precision] if kind == "fsdp" else torch.float32)
        if recompute:
            unet.enable_gradient_checkpointing()
        one = _saved(unet, 1, kind, precision, resolution)
        # Only autocast keeps something whatever the batch; a second batch tells it apart.
        two = _saved(unet, 2, kind, precision, resolution) if kind == "ddp" else 2 * one
    return Activations(two - one, 2 * one - two)


def _saved(unet: Any, batch: int, kind: str, precision: str, resolution: int) -> int:
    own = {weights.untyped_storage()._cdata for weights in unet.parameters()}
    kept = dict[int, Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in own:
            kept[storage._cdata] = tensor  # held, so that no other storage takes its place
        return tensor

    dtype = next(unet.parameters()).dtype
    inputs = torch.empty(batch, *latent_shape(resolution), dtype=dtype, device="cuda")
    text = torch.empty(batch, TOKENS, SD2.unet["cross_attention_dim"], dtype=dtype, device="cuda")
    steps = torch.zeros(batch, dtype=torch.int64, device="cuda")
    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), _autocast(kind == "ddp", DTYPES[precision]):
        predict(unet, inputs, steps, text)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@contextmanager
def _autocast(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Switch CUDA's autocast on where there is no CUDA, for which torch.autocast refuses."""
    if enabled and dtype != torch.float32:
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def _unet(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # fake weights cannot be swapped for others later
    try:
        with torch.device("cuda"):
            return unet_class().from_config(dict(SD2.unet)).train()
    finally:
        torch.set_default_dtype(before)


@cache
def _largest_blocks() -> int:
    """Return the parameters of the two largest blocks: full_shard gathers one while it computes with another."""
    with torch.device("meta"):
        unet = unet_class().from_config(dict(SD2.unet))
    return sum(sorted(sum(p.numel() for p in block.parameters()) for block in blocks(unet))[-2:])


class _Attention(torch.autograd.Function):
    """Flash attention as far as memory is concerned: it keeps its inputs, its output and a row of sums."""

    @staticmethod
    def call(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        result: Tensor = _Attention.apply(query, key, value)
        return result

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # as flash attention lays it
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums)
        return output


def as_text(memories: list[Memory], resolution: int) -> list[str]:
    """Return the estimates at one resolution as lines for a person."""
    own = memories[0]
    gib = 1 << 30
    size = own.gpu.memory_bytes / gib
    verdict = "fits" if own.fits else "does not fit"
    parts = {**own.parts, "activations": own.per_sample * own.batch}
    lines = [
        f"Memory at {resolution} px: {own.name}, {own.batch} a GPU: {verdict} in one {own.gpu.name} of {size:.0f} GiB, "
        f"of which {MARGIN:.0%} are left for what is not counted",
        *(f"  {part:20} {value / gib:6.1f} GiB" for part, value in parts.items()),
        f"  {'all':20} {own.total / gib:6.1f} GiB",
    ]
    return lines + [
        f"  {each.name}: {each.total / gib:.1f} GiB, at most {each.largest_batch} a GPU" for each in memories
    ]
