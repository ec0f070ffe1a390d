"""The limits of a run (steps, epochs, samples, hours, cost), and the forecast of its end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdp.config import TrainConfig
from sdp.console import counted
from sdp.model.checkpoints import TrainState
from sdp.plan.model import InstanceGroup, Stage, stage
from sdp.plan.speeds import unet_flops


@dataclass(frozen=True, slots=True)
class OtherPhases:
    """The phase before the one that runs, and the phase after it; zeros if there is none."""

    gpu_hours: float = 0.0
    """GPU-hours of the phase before."""
    cost: float = 0.0
    samples: float = 0.0
    """Samples of the phase after, converted to samples of the one that runs by the U-Net's FLOPs."""

    def __bool__(self) -> bool:
        return any((self.gpu_hours, self.cost, self.samples))


def reached_limit(config: TrainConfig, state: TrainState) -> str | None:
    """Return the limit on steps, epochs or samples that a run has reached, if any."""
    if config.max_steps is not None and state.step >= config.max_steps:
        return f"max_steps: {counted(config.max_steps, 'step')}"
    if config.max_epochs is not None and state.epoch >= config.max_epochs:
        return f"max_epochs: {counted(config.max_epochs, 'pass', 'passes')} over the data"
    if config.max_samples is not None and state.samples >= config.max_samples:
        return f"max_samples: {counted(state.samples, 'sample')}"
    return None


def used_up_budget(config: TrainConfig, state: TrainState) -> str | None:
    """Return the budget that a run has used up, if any, and the remedy."""
    if config.max_hours is not None and state.seconds >= config.max_hours * 3600:
        return "max_hours is used up; raise it to continue"
    if config.max_cost is not None and state.cost >= config.max_cost:
        return "max_cost is used up; raise it to continue"
    return None


def last_step(config: TrainConfig, state: TrainState, rows: int, batch: int) -> int | None:
    """Return the step at which max_steps or max_epochs ends the run; None if neither is set."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.max_epochs is not None and state.epoch < config.max_epochs:
        full_epochs = config.max_epochs - state.epoch - 1
        ends.append(state.step + -(-(rows - state.position) // batch) + full_epochs * -(-rows // batch))
    return min(ends) if ends else None


def samples_to_come(config: TrainConfig, phases: Sequence[TrainConfig]) -> float:
    """Return the samples of later phases, converted to samples of this one by the U-Net's FLOPs."""
    return sum(
        (phase.max_steps or 0)
        * phase.data.batch_of(phase.scaling.most)
        * (unet_flops(phase.data.resolution) / unet_flops(config.data.resolution))
        for phase in phases
    )


def forecast(
    config: TrainConfig,
    state: TrainState,
    last: int | None,
    batch: int,
    rate: float,
    group: InstanceGroup,
    to_come: float = 0.0,
) -> Stage:
    """Return the hours, GPU-hours and cost of the rest of a job, as sdp plan computes them.

    `last` is the run's last step, and `to_come` are the samples of later phases. If no limit tells the end, the rest is
    infinitely long.
    """
    own = [math.inf if last is None else float((last - state.step) * batch)]
    if config.max_samples is not None:
        own.append(config.max_samples - state.samples)
    left = [max(0.0, min(own)) + to_come]
    if config.max_hours is not None:
        left.append((config.max_hours * 3600 - state.seconds) * rate)
    if config.max_cost is not None and group.per_hour:
        left.append((config.max_cost - state.cost) / group.per_hour * 3600 * rate)
    return stage("rest", max(0.0, min(left)), rate, [group])
