"""A trainer's memory on its GPU, by activity, for the U-Net of Stable Diffusion 1 and 2; without torch.

Weights, gradients and AdamW's averages follow from the number of parameters. What the forward pass keeps for the
backward pass is in reference.yaml, as sdp.train.activations measures it on fake tensors; `--memory` measures it again
for the configuration. Fragmentation, NCCL's buffers, cuDNN's workspaces and the backward pass's own temporaries are not
counted: MARGIN keeps room for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sdp.config import ProcessConfig, TrainConfig
from sdp.config.process import usual_batch
from sdp.config.train import LoraConfig
from sdp.errors import ConfigError, Problem
from sdp.hardware import GIB, Gpu, gpus_by_accelerator
from sdp.model.family import SD2, Family
from sdp.plan.prices import reference

MARGIN = 0.1
"""Share of a GPU's memory that is left for what is not counted."""
_FP32 = 4
_8_BIT = 1 + 4 / 256
"""Bytes of a value in 8 bits, with the scale of its block of 256."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a forward pass keeps for the backward pass."""

    per_sample: float
    fixed: float
    """Independent of the batch: low-precision copies of weights under autocast."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A trainer's memory with one strategy."""

    name: str
    parts: Mapping[str, float]
    """Bytes by activity, without activations."""
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


Measure = Callable[[TrainConfig], Activations]


def known_activations(config: TrainConfig) -> Activations:
    """Return the recorded figures; sizes other than 256 and 512 px are on the straight line in the number of pixels."""
    kind = "fp32" if config.precision == "fp32" else config.strategy.kind
    of = reference()["memory"][kind + "+checkpointed" * config.strategy.activation_checkpointing]
    slope = (of["512"] - of["256"]) / (512**2 - 256**2)
    return Activations(of["256"] + slope * (config.data.resolution**2 - 256**2), of["fixed"])


@dataclass(frozen=True, slots=True)
class Place:
    """The trainers' GPUs, and what they hold besides the U-Net."""

    gpu: Gpu
    workers: int
    embedded: bool
    """Captions come as embeddings: no trainer holds a text encoder."""
    local: int = 8
    """GPUs of a node, within which hybrid shards."""
    family: Family = SD2
    measure: Measure = known_activations


def estimates(config: TrainConfig, place: Place) -> list[Memory]:
    """Return the memory with the configured strategy first, then with ddp, fsdp and activation checkpointing."""
    own = (config.strategy.kind, config.strategy.activation_checkpointing)
    kinds = ("ddp", "fsdp") if config.precision != "fp16" else ("ddp",)
    choices = dict.fromkeys([own, *((kind, recompute) for kind in kinds for recompute in (False, True))])
    return [
        estimate(_with_changes(config, kind=kind, activation_checkpointing=recompute), place)
        for kind, recompute in choices
    ]


def estimate(config: TrainConfig, place: Place) -> Memory:
    """Return the memory of the GPU that the U-Net is on, with the configured strategy."""
    strategy, networks = config.strategy, ["unet"]
    second = config.scaling.gpus_per_worker > 1  # which has the text encoder
    if config.model.train_text_encoder and not second:
        networks.append("text_encoder")
    count = sum(place.family.parameters[name] for name in networks)
    sharded, half = strategy.kind == "fsdp", _FP32 if config.precision == "fp32" else 2
    shards = min(place.local, place.workers) if strategy.shard == "hybrid" else place.workers
    activations = place.measure(config)
    per_sample, fixed = activations.per_sample, activations.fixed
    if len(networks) > 1:
        kind = "checkpointed" if strategy.activation_checkpointing else "fp32" if half == _FP32 else strategy.kind
        text, size = reference()["memory"]["text_encoder"][kind], _text_size(place.family) / _text_size(SD2)
        per_sample, fixed = per_sample + text["per_sample"] * size, fixed + text["fixed"] * size
    trained = learnt(config.lora, count, networks)
    state, change = (_FP32 * parameters / (shards if sharded else 1) for parameters in (count, trained))
    moment = change * _8_BIT / _FP32 if config.optimizer.kind == "adamw_8bit" else change
    parts = {"weights": state, "gradients": change, "optimizer": 2 * moment}
    if config.ema.decay is not None:
        parts["average"] = change
    if sharded:
        gathered = reference()["memory"]["two_largest_blocks"] if strategy.shard == "full_shard" else count
        parts["all-gathers"] = float(half * gathered)
    parts["copies for autocast"] = fixed
    if not (place.embedded or config.model.train_text_encoder or second):
        parts["text encoder"] = float(half * place.family.parameters["text_encoder"])
    name = f"fsdp {strategy.shard}" if sharded else "ddp"
    name += f", LoRA of rank {config.lora.rank}" * (config.lora.rank is not None)
    name += ", checkpointed activations" * strategy.activation_checkpointing
    parts = {activity: amount for activity, amount in parts.items() if amount}
    return Memory(name, parts, per_sample, _micro_batch(config, place.workers), config.data.resolution, place.gpu)


def _text_size(family: Family) -> int:
    """Return the size to which a text encoder's activations are proportional."""
    return int(family.text_encoder["num_hidden_layers"] * family.text_encoder["hidden_size"])


def _micro_batch(config: TrainConfig, workers: int) -> int:
    """Return the samples that a trainer takes at once: its share of a step, in equal pieces of batch_size at most."""
    batch, global_batch = config.data.batch_size, config.data.global_batch_size
    share = -(-global_batch // workers) if global_batch is not None else batch
    return -(-share // -(-share // batch))


def _with_changes(config: TrainConfig, **changes: object) -> TrainConfig:
    return config.model_copy(update={"strategy": config.strategy.model_copy(update=changes)})


def learnt(lora: LoraConfig, count: int, networks: Sequence[str] = ("unet",)) -> float:
    """Return the number of trained parameters; LoRA's targets outside attention are counted like those in attention."""
    per_rank = reference()["memory"]["lora_per_rank"]
    return count if lora.rank is None else lora.rank * sum(per_rank[name] for name in networks)


def each_phase(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield the configuration, and once more with the data of a second phase if there is one."""
    yield config
    second = config.phase_2
    if second.max_steps is not None:
        sizes = {name: getattr(second, name) for name in ("resolution", "batch_size", "global_batch_size")}
        data, source = config.data.replaced(**sizes), config.source.replaced(uri=second.source)
        yield config.model_copy(update={"data": data, "source": source})


def fit(config: TrainConfig, family: Family | None, *, embedded: bool) -> str | None:
    """Refuse a trainer that cannot fit the accelerator it names; return a warning for one that may not, else None.

    An unknown GPU or model is accepted. A trainer is refused if even an underestimate exceeds the whole memory: where
    torch.compile or LoRA may keep less than measured, that is the estimate with checkpointed activations.
    """
    gpus = gpus_by_accelerator(config.scaling.accelerator or "")
    if not gpus or family is None:
        return None
    gpu, strategy = max(gpus, key=lambda gpu: gpu.memory_bytes), config.strategy
    place = Place(gpu, config.scaling.most, embedded, family=family)
    own = least = estimate(config, place)
    if strategy.compile or strategy.fp8.enabled or config.lora.rank is not None:
        least = estimate(_with_changes(config, activation_checkpointing=True), place)
    of = f"{gpu.name} of {gpu.memory_bytes / GIB:.0f} GiB at {config.data.resolution} px"
    hint = "strategy.kind: fsdp and strategy.activation_checkpointing need less; sdp plan --memory has the figures"
    needed = f"which would need {least.total / GIB:.0f} GiB"
    if place.workers == 1:  # gradients appear as activations are freed
        least = replace(least, parts={**least.parts, "gradients": 0.0})
    if least.total > gpu.memory_bytes:
        if most := least.largest(1.0):
            raise ConfigError(
                [Problem("data.batch_size", f"at most {most} for an {of}, {needed}", str(config.data.batch_size), hint)]
            )
        raise ConfigError([Problem("strategy.kind", f"one that fits an {of}, {needed}", strategy.kind, hint)])
    if own.fits:
        return None
    return (
        f"data.batch_size: {own.batch} at once may not fit an {of}: {own.total / GIB:.0f} GiB are needed, and a tenth "
        f"is left for what is not counted, so that {own.largest_batch} would be safe; {hint}"
    )


def encoders(config: TrainConfig | ProcessConfig, gpu: Gpu) -> Iterator[str]:
    """Yield a line on an encoder's GPU memory for each resolution; none if there are no encoders."""
    encode, memory = config.encode, reference()["memory"]["encoding"]
    if isinstance(config, ProcessConfig):
        batches, embedded = config.encode.batch_sizes(config.resolutions), encode.text == "text_embedding"
    elif config.data.mode == "offline":
        return
    else:
        sides = [phase.data.resolution for phase in each_phase(config)]
        batches = {side: config.encode.batch_size or usual_batch(side) for side in sides}
        embedded = config.text_encoded
    itemsize = 4 if encode.dtype == "fp32" else 2
    weights = itemsize * (memory["vae"] + embedded * SD2.parameters["text_encoder"])
    for side, batch in batches.items():
        per_image = memory["bytes_per_pixel"] * side**2 * itemsize / 2
        most = int((gpu.memory_bytes * (1 - MARGIN) - weights) // per_image)
        yield (
            f"An encoder at {side} px: a batch of {batch} takes {(weights + batch * per_image) / GIB:.1f} of "
            f"the {gpu.name}'s {gpu.memory_bytes / GIB:.0f} GiB; {most} images fit, and larger batches are halved"
        )


def as_text(memories: Sequence[Memory]) -> list[str]:
    """Return the estimates of one phase as lines for a person; activations of the first were just measured."""
    own = memories[0]
    size = own.gpu.memory_bytes / GIB
    verdict = "fits" if own.fits else "does not fit"
    parts = {**own.parts, "activations": own.per_sample * own.batch}
    lines = [
        f"Memory at {own.resolution} px: {own.name}, {own.batch} a GPU: {verdict} in one {own.gpu.name} of {size:.0f} "
        f"GiB, of which {MARGIN:.0%} are left for what is not counted",
        *(f"  {part:20} {value / GIB:6.1f} GiB" for part, value in parts.items()),
        f"  {'all':20} {own.total / GIB:6.1f} GiB",
        *(
            f"  {memory.name}: {memory.total / GIB:.1f} GiB, at most {memory.largest_batch} a GPU"
            for memory in memories
        ),
    ]
    return [*lines, "  activations: of the first counted just now on fake tensors, of the others as recorded"]
