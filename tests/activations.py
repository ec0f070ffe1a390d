"""The memory of the U-Net's activations, counted on fake tensors without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sdp.config import TrainConfig
from sdp.config.train import LoraConfig
from sdp.device import DTYPES
from sdp.model.family import SD2, TOKENS, latent_shape, predict, unet_class
from sdp.model.lora import add_lora
from sdp.plan.memory import Activations
from sdp.train.strategies import cast_norms


def activations(config: TrainConfig) -> Activations:
    """Count the bytes that a forward pass saves for the backward pass, assuming flash attention.

    With activation checkpointing the largest block is added, since it is recomputed as a whole.
    """
    strategy = config.strategy
    sharded = strategy.kind == "fsdp" or config.precision == "fp32"  # then autocast casts nothing
    return _activations(
        sharded, config.precision, strategy.activation_checkpointing, config.data.resolution, config.lora
    )


@cache
def _activations(sharded: bool, precision: str, recompute: bool, resolution: int, lora: LoraConfig) -> Activations:
    dtype = DTYPES[precision]
    with FakeTensorMode(), mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _Attention.call):
        unet = _unet(dtype if sharded else torch.float32, lora)
        if not sharded:
            cast_norms(unet, dtype)
        blocks = _watched_blocks(unet) if recompute else []
        # Autocast also saves bytes that do not depend on the batch; two batch sizes separate them.
        one, two = (_saved(unet, batch, dtype, resolution, blocks) for batch in (1, 2))
    slopes = [after - before for before, after in zip(one, two, strict=True)]
    return Activations(slopes[0] + max(slopes[1:], default=0), one[0] - slopes[0])


def _saved(unet: Any, batch: int, dtype: torch.dtype, resolution: int, blocks: list[int]) -> list[int]:
    """Return the bytes that are saved, followed by those that each checkpointed block saves when it is recomputed."""
    blocks.clear()
    weights = next(unet.parameters()).dtype
    inputs = torch.empty(batch, *latent_shape(resolution), dtype=weights, device="cuda")
    text = torch.empty(batch, TOKENS, SD2.unet["cross_attention_dim"], dtype=weights, device="cuda")
    steps = torch.zeros(batch, dtype=torch.int64, device="cuda")
    with _counting(unet) as saved_bytes, _autocast(weights != dtype, dtype):
        predict(unet, inputs, steps, text)
    return [saved_bytes(), *blocks]


def _watched_blocks(unet: Any) -> list[int]:
    """Enable checkpointing; each forward pass adds to the returned list what each block would save without it."""
    unet.enable_gradient_checkpointing()
    saved = list[int]()
    modules = [module for module in unet.modules() if getattr(module, "gradient_checkpointing", False)]
    checkpoint = modules[0]._gradient_checkpointing_func

    def watched(block: Any, *inputs: Any, **options: Any) -> Any:
        with _counting(unet) as saved_bytes:
            block(*inputs, **options)
            saved.append(saved_bytes())
        return checkpoint(block, *inputs, **options)

    for module in modules:
        module._gradient_checkpointing_func = watched
    return saved


@contextmanager
def _counting(unet: Any) -> Iterator[Callable[[], int]]:
    """Count the bytes that are saved for the backward pass, without the weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}
    saved = dict[int, Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in weights:
            saved[storage._cdata] = tensor  # kept alive, so that no other storage gets its address
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield lambda: sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@contextmanager
def _autocast(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Enable CUDA's autocast on a machine without CUDA, where torch.autocast refuses to."""
    if enabled:
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def _unet(dtype: torch.dtype, lora: LoraConfig) -> Any:
    with _default_dtype(dtype):
        unet = unet_class().from_config(dict(SD2.unet)).train()
        if lora.rank is not None:
            add_lora(unet, lora.rank, lora.scale, lora.targets)
    return unet


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create networks in a dtype on a GPU, since fake weights cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            yield
    finally:
        torch.set_default_dtype(before)


class _Attention(torch.autograd.Function):
    """Saves what flash attention saves: its inputs, its output and a row of sums."""

    @staticmethod
    def call(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        result: Tensor = _Attention.apply(query, key, value)
        return result

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # flash attention's layout
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums)
        return output
