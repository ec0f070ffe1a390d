"""An estimate of a trainer's GPU memory, by use, for the models of families/known.json. It needs no torch.

Weights, gradients and the optimizer's state follow from the number of parameters. Activations, which the forward pass
keeps for the backward pass, are recorded in reference.yaml, as counted on fake tensors for eager and for compiled code.
Fragmentation, NCCL's buffers, cuDNN's workspaces and the backward pass's own temporaries are not counted: MARGIN keeps
room for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sdp.config.train import TrainConfig
from sdp.errors import ConfigError, Problem, UserError
from sdp.families import KnownModel
from sdp.families.sd import SD2
from sdp.hardware import GIB, Gpu, gpus_by_accelerator
from sdp.plan.prices import reference

MARGIN = 0.1
"""Share of a GPU's memory that is left for what is not counted."""
_FP32 = 4
"""Bytes of a value."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A trainer's memory with one strategy."""

    name: str
    parts: Mapping[str, float]
    """Bytes by use, without activations."""
    per_sample: float
    batch: int
    resolution: int
    gpu: Gpu

    @property
    def total(self) -> float:
        return sum(self.parts.values()) + self.per_sample * self.batch

    @property
    def fits(self) -> bool:
        return self.batch <= self.largest_batch

    @property
    def largest_batch(self) -> int:
        return self.largest(1 - MARGIN)

    def largest(self, share: float) -> int:
        """Return the largest batch that takes no more than a share of the memory."""
        return max(0, int((self.gpu.memory_bytes * share - sum(self.parts.values())) // self.per_sample))


def _activations(config: TrainConfig, known: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes that a forward pass keeps for the backward pass: for each sample, and for any batch.

    The latter are low-precision copies of weights under autocast. Between and beyond the recorded 256 and 512 px, bytes
    are a linear function of the number of pixels.
    """
    kind = "fp32" if config.precision == "fp32" else config.strategy.kind
    checkpointed = config.strategy.activation_checkpointing
    recorded = known[f"{kind}+checkpointed" if checkpointed else kind]
    # With LoRA, the figures of eager code are an upper bound.
    if config.strategy.compile and not checkpointed and config.lora.rank is None:
        recorded = known.get(f"{kind}+compiled", recorded)
    slope = (recorded["512"] - recorded["256"]) / (512**2 - 256**2)
    return recorded["256"] + slope * (config.data.resolution**2 - 256**2), recorded["fixed"]


def estimate(config: TrainConfig, gpu: Gpu, workers: int, *, embedded: bool, family: KnownModel = SD2) -> Memory:
    """Return the memory of the GPU that holds the denoiser, with the configured strategy.

    No trainer holds a text encoder if captions come as embeddings.
    """
    strategy, networks, known = config.strategy, ["unet"], reference()[family.memory]
    if config.model.train_text_encoder:
        if not family.text_encoder:
            raise UserError(f"plan: the memory of {family.name} with a trained text encoder is not known")
        networks.append("text_encoder")
    parameters = sum(family.parameters[name] for name in networks)
    sharded = strategy.kind == "fsdp"
    itemsize = _FP32 if config.precision == "fp32" else 2
    per_sample, fixed = _activations(config, known)
    if len(networks) > 1:
        kind: str = "fp32" if itemsize == _FP32 else strategy.kind
        if strategy.activation_checkpointing:
            kind = "checkpointed"
        text, size = known["text_encoder"][kind], _text_size(family) / _text_size(SD2)
        per_sample, fixed = per_sample + text["per_sample"] * size, fixed + text["fixed"] * size
    trained, frozen, rank = parameters, 0, config.lora.rank
    if rank is not None:
        unet, per_rank = family.parameters["unet"], known["lora_per_rank"]
        trained = rank * sum(per_rank[name] for name in networks)  # as if lora.targets were the default
        frozen = itemsize * unet + _FP32 * (parameters - unet)
        fixed = 0.0  # a frozen denoiser is in the precision already, so autocast makes no copies
    shares = workers if sharded else 1
    trained_bytes = _FP32 * trained / shares
    micro_batches, micro_batch = _micro_batches(config, workers)
    parts = {"weights": frozen / shares + trained_bytes, "gradients": trained_bytes}
    if sharded and micro_batches > 1:  # until the last micro-batch, fsdp adds up whole gradients
        parts["gradients"] += _FP32 * trained
    parts["optimizer"] = _states(config, known) * trained_bytes
    if config.ema.decay is not None:
        parts["average"] = trained_bytes
    if sharded:
        gathered = known["two_largest_blocks"] if strategy.shard == "full_shard" else parameters
        parts["all-gathers"] = float(itemsize * gathered)
    parts["copies for autocast"] = fixed
    if not (embedded or config.model.train_text_encoder):
        parts["text encoder"] = float(itemsize * family.parameters["text_encoder"])
    name = f"fsdp {strategy.shard}" if sharded else "ddp"
    if rank is not None:
        name += f", LoRA of rank {rank}"
    if strategy.activation_checkpointing:
        name += ", checkpointed activations"
    parts = {use: amount for use, amount in parts.items() if amount}
    return Memory(name, parts, per_sample, micro_batch, config.data.resolution, gpu)


def _states(config: TrainConfig, known: Mapping[str, Any]) -> float:
    """Return the size of the optimizer's state, as a multiple of the trained weights."""
    kind, rank = config.optimizer.kind, config.lora.rank
    of_any = {"adamw": 2.0, "adamw8bit": 2 * (1 / 4 + 1 / 256), "prodigy": 4.0}  # with a scale for 256 values in 8 bits
    of_matrices = {"muon": 1.0, "adafactor": 1 / (rank or 1)}
    return of_any.get(kind) or float((known["states"] if rank is None else of_matrices)[kind])


def _text_size(family: KnownModel) -> int:
    """Return a text encoder's layers times its width, to which its activations are proportional."""
    return int(family.text_encoder["num_hidden_layers"] * family.text_encoder["hidden_size"])


def _micro_batches(config: TrainConfig, workers: int) -> tuple[int, int]:
    """Return the number of equal parts of a trainer's share of a step, of at most batch_size, and a part's samples."""
    batch, global_batch = config.data.batch_size, config.data.global_batch_size
    share = -(-global_batch // workers) if global_batch is not None else batch
    count = -(-share // batch)
    return count, -(-share // count)


def fit(config: TrainConfig, family: KnownModel | None, *, embedded: bool) -> str | None:
    """Refuse a trainer that cannot fit the accelerator it names; return a warning for one that may not, else None.

    An unknown GPU or model is accepted. A trainer is refused only if a lower bound exceeds the whole memory. With
    torch.compile or LoRA, which may keep less than was measured, the bound has checkpointed activations.
    """
    gpus = gpus_by_accelerator(config.scaling.gpu_type or "")
    if not gpus or family is None or (config.model.train_text_encoder and not family.text_encoder):
        return None
    gpu, strategy = max(gpus, key=lambda gpu: gpu.memory_bytes), config.strategy
    memory_of = partial(estimate, gpu=gpu, workers=config.scaling.most, embedded=embedded, family=family)
    own = least = memory_of(config)
    if strategy.compile or config.lora.rank is not None:
        least = memory_of(config.replaced(strategy=strategy.replaced(activation_checkpointing=True)))
    lower_bound = least
    if config.scaling.most == 1:  # gradients appear as activations are freed
        lower_bound = replace(least, parts={**least.parts, "gradients": 0.0})
    hardware = f"{gpu.name} of {gpu.memory_bytes / GIB:.0f} GiB at {config.data.resolution} px"
    hint = "strategy.kind: fsdp and strategy.activation_checkpointing need less; sdp plan --memory has the figures"
    if lower_bound.total > gpu.memory_bytes:
        needed = f"which needs {least.total / GIB:.0f} GiB"
        if most := lower_bound.largest(1.0):
            got = f"{config.data.batch_size}, {needed}"
            raise ConfigError([Problem("data.batch_size", f"at most {most} on an {hardware}", got, hint)])
        got = f"{strategy.kind}, {needed}"
        raise ConfigError([Problem("strategy.kind", f"one that fits an {hardware}", got, hint)])
    if own.fits:
        return None
    return (
        f"data.batch_size: {own.batch} at once may not fit an {hardware}: this needs {own.total / GIB:.0f} GiB, and a "
        f"tenth of the memory is kept for what is not counted; {own.largest_batch} would be safe; {hint}"
    )


def as_text(memory: Memory) -> str:
    """Return an estimate as lines for a person."""
    size = memory.gpu.name
    if memory.gpu.peak_flops:
        size = f"one {size} of {memory.gpu.memory_bytes / GIB:.0f} GiB"
    verdict = "fits" if memory.fits else "does not fit"
    ways = [f"data.batch_size: {memory.largest_batch}" if memory.largest_batch else "lora.rank: 16"]
    if "checkpointed" not in memory.name:
        ways.append("strategy.activation_checkpointing: true")
    hint = "" if memory.fits else f"; set {' or '.join(ways)}"
    parts = {**memory.parts, "activations": memory.per_sample * memory.batch, "all": memory.total}
    heading = (
        f"Memory at {memory.resolution} px: {memory.name}, {memory.batch} a GPU: {verdict} in {size}, of "
        f"which {MARGIN:.0%} are kept for what is not counted; at most {memory.largest_batch} fit{hint}"
    )
    return "\n".join([heading, *(f"  {part:20} {value / GIB:6.1f} GiB" for part, value in parts.items())])
