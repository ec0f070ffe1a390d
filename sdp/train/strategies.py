"""Strategies for training one model on several workers: a replica each (ddp), or a shard each (fsdp)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sdp.config.train import StrategyConfig
from sdp.device import DTYPES, configure_compiler
from sdp.model.trained import TrainedNetworks
from sdp.train.world import World

Sharding = Literal["shard_grad_op", "full_shard"]


class Strategy:
    """A model that is wrapped for training."""

    model: nn.Module
    """The module to call in a forward pass."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, which sets its precision unless the module does."""
        return nullcontext()

    def backward(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002 (for several workers)
        """Return the context of a micro-batch's forward and backward pass; only the `last` exchanges gradients."""
        return nullcontext()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients, given this worker's shards of them."""
        norms = torch._foreach_norm(list(gradients))
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm


class Replicated(Strategy):
    """DistributedDataParallel with autocast; a single worker's model is not wrapped."""

    def __init__(self, model: nn.Module, world: World, precision: str) -> None:
        self._precision = precision
        self._device = world.device.type
        if precision != "fp32":
            cast_norms(model, DTYPES[precision])
        self.model = model
        if world.size > 1:
            self.model = DistributedDataParallel(
                model,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # they are constants
            )

    def forward(self) -> AbstractContextManager[Any]:
        if self._precision == "fp32":
            return super().forward()
        return torch.autocast(self._device, DTYPES[self._precision])

    def backward(self, *, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return super().backward(last=last)


def cast_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Have normalisations return a dtype, as with fsdp: autocast keeps their inputs and outputs in fp32 on a GPU."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            module.forward = partial(_normalised, module, dtype)  # type: ignore[method-assign]


def _normalised(module: nn.GroupNorm | nn.LayerNorm, dtype: torch.dtype, values: Tensor) -> Tensor:
    weight, bias = (None if each is None else each.to(dtype) for each in (module.weight, module.bias))
    with torch.autocast(values.device.type, enabled=False):
        if isinstance(module, nn.GroupNorm):
            return functional.group_norm(values.to(dtype), module.num_groups, weight, bias, module.eps)
        return functional.layer_norm(values.to(dtype), module.normalized_shape, weight, bias, module.eps)


class Sharded(Strategy):
    """FSDP2: weights, gradients, moving average and optimizer state in shards, block by block. Its policy casts."""

    def __init__(self, model: TrainedNetworks, world: World, precision: str, sharding: Sharding) -> None:
        mesh = init_device_mesh(world.device.type, (world.size,))
        half = DTYPES[precision] if precision != "fp32" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        # SHARD_GRAD_OP keeps the gathered weights until backward: less traffic for more memory.
        options: Any = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": sharding == "full_shard"}
        shards = [fully_shard(block, **options) for block in list(model.blocks())]
        self._shard = fully_shard(model, **options)
        self._keeps_gathered = sharding != "full_shard"
        for before, after in pairwise(shards):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        self.model = model

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        self._shard.set_requires_gradient_sync(last)
        if self._keeps_gathered:  # for the next micro-batch, which needs the same weights
            self._shard.set_reshard_after_backward(last)
        yield

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        square = super().norm(gradients).square()
        dist.all_reduce(square)
        return square.sqrt()


def make_strategy(config: StrategyConfig, model: TrainedNetworks, world: World, precision: str) -> Strategy:
    """Wrap networks on the worker's device in the configured strategy."""
    if config.kind == "fsdp":
        return Sharded(model, world, precision, config.shard)
    return Replicated(model, world, precision)


LARGER_KERNELS = {"realize_opcount_threshold": 200, "realize_reads_threshold": 8, "realize_acc_reads_threshold": 24}
"""Limits on a value that kernels compute again where they use it. With Inductor's own, the backward pass of a norm
writes three tensors in fp32 and reads them again."""


def compile_blocks(blocks: Iterable[nn.Module], backend: Any = "inductor") -> None:
    """Compile block by block, which takes a tenth of the time: blocks of one shape share their compiled code."""
    configure_compiler()
    torch._dynamo.config.optimize_ddp = False  # it would split the blocks, which are small enough, at ddp's buckets
    for block in blocks:
        block.compile(backend=backend, dynamic=False, options=LARGER_KERNELS if backend == "inductor" else None)
