"""Upper bounds on the trainers' speed, set by arithmetic, memory bandwidth and the network between nodes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sdp.config import TrainConfig
from sdp.hardware import GPUS
from sdp.model.family import SD2
from sdp.plan.make import PlannedJob
from sdp.plan.memory import known_activations, trained_parameters
from sdp.plan.prices import reference
from sdp.plan.speeds import Speeds, unet_flops


@dataclass(frozen=True, slots=True)
class Roofline:
    """Upper bounds on the images per second of all trainers together."""

    resolution: int
    bounds: Mapping[str, float]
    """A bound for each resource; the network has one only with several nodes."""

    @property
    def limit(self) -> str:
        """The resource with the lowest bound."""
        return min(self.bounds, key=lambda name: self.bounds[name])


def rooflines(config: TrainConfig, work: PlannedJob) -> Iterator[Roofline]:
    """Yield the bounds of each phase on the plan's trainers."""
    gpu, nodes = GPUS[str(work.trainers.gpu)], work.trainer_count
    parameters, weight_bytes = SD2.parameters["unet"], 4 if config.precision == "fp32" else 2
    sharded, shard = config.strategy.kind == "fsdp", config.strategy.shard
    shard_group = min(work.trainers.gpus, work.trainer_gpus) if shard == "hybrid" else work.trainer_gpus
    shards = shard_group if sharded else 1
    gradient_bytes = trained_parameters(config.lora, parameters) * (2 if config.strategy.half_gradients else 4)
    # Between nodes, an all-reduce sends its tensor twice; an all-gather and a reduce-scatter send theirs once.
    gathered_bytes = weight_bytes * parameters * (2 if shard == "full_shard" else 1)
    bytes_sent = gathered_bytes + gradient_bytes if sharded and shard != "hybrid" else 2 * gradient_bytes
    for phase in config.phases:
        side, batch = phase.data.resolution, phase.data.batch_of(work.trainer_gpus)
        flops = unet_flops(side) * (1 - fp8_share(config) * (1 - gpu.peak_flops / gpu.peak_fp8))
        flops += 0.0 if config.text_encoded else float(reference()["flops"]["text"])
        # The forward pass writes activations and the backward pass reads them. Both read the weights. The optimizer
        # reads and writes five fp32 numbers a parameter: gradient, weight, moving average and AdamW's two averages.
        activation_bytes = 2 * known_activations(phase).per_sample * batch / work.trainer_gpus
        bytes_moved = activation_bytes + (2 * weight_bytes + 40 / shards) * parameters
        bounds = {
            "compute": work.trainer_gpus * gpu.peak_flops / flops,
            "memory bandwidth": batch * gpu.memory_bandwidth / bytes_moved,
        }
        if nodes > 1:
            bounds["network"] = batch * work.trainers.network_gbps * 1e9 / 8 / (bytes_sent * (nodes - 1) / nodes)
        yield Roofline(side, bounds)


def fp8_share(config: TrainConfig) -> float:
    """Return the share of the U-Net's operations that the configuration runs in fp8."""
    fp8 = config.strategy.fp8
    shares: Mapping[str, float] = reference()["flops"]["fp8"] if fp8.enabled and not fp8.emulate else {}
    return sum(share for width, share in shares.items() if int(width) >= fp8.min_features)


def line(roofline: Roofline, work: PlannedJob, speeds: Speeds) -> str:
    """Return the bounds as text, with the share of the lowest one that the plan assumes."""
    bounds, limit = roofline.bounds, roofline.limit
    figure = speeds.train(str(work.trainers.gpu), roofline.resolution)
    figures = ", ".join(f"{value:,.{0 if value >= 10 else 1}f} by {name}" for name, value in bounds.items())
    share = figure.value * work.trainer_gpus / bounds[limit]
    wrong = f", which cannot be reached: count on {share:,.0f} times the hours and the cost" if share >= 1.5 else ""
    return (
        f"at {roofline.resolution} px, at most (img/s): {figures}; {limit} limits; "
        f"the plan assumes {share:,.1%} of that{wrong}"
    )
