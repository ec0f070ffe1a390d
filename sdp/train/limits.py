"""The limits of a run (steps, epochs, samples, hours, cost), and the forecast of its end."""

import math

from sdp.config import TrainConfig
from sdp.plan.model import Group, Stage, stage
from sdp.train.state import TrainState


def reached_limit(config: TrainConfig, state: TrainState) -> str | None:
    """Return the limit on steps, epochs or samples that a run has reached, if any."""
    if config.max_steps is not None and state.step >= config.max_steps:
        return f"max_steps: {config.max_steps} steps"
    if config.max_epochs is not None and state.epoch >= config.max_epochs:
        return f"max_epochs: {config.max_epochs} passes over the data"
    if config.max_samples is not None and state.samples >= config.max_samples:
        return f"max_samples: {state.samples} samples"
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
        whole = config.max_epochs - state.epoch - 1
        ends.append(state.step + -(-(rows - state.position) // batch) + whole * -(-rows // batch))
    return min(ends) if ends else None


def forecast(config: TrainConfig, state: TrainState, last: int | None, batch: int, rate: float, held: Group) -> Stage:
    """Return the hours, GPU-hours and cost of the rest of a run whose last step is `last`, as sdp plan computes them.

    If no limit tells the end, the rest is infinitely long.
    """
    left = [math.inf if last is None else float((last - state.step) * batch)]
    if config.max_samples is not None:
        left.append(config.max_samples - state.samples)
    if config.max_hours is not None:
        left.append((config.max_hours * 3600 - state.seconds) * rate)
    if config.max_cost is not None and held.per_hour:
        left.append((config.max_cost - state.cost) / held.per_hour * 3600 * rate)
    return stage("rest", max(0.0, min(left)), rate, [held])
