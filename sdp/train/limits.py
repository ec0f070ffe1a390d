"""The limits of a run (steps, epochs, samples, hours), and the forecast of its end."""

import math

from sdp.config.train import TrainConfig
from sdp.console import counted
from sdp.model.checkpoints import TrainState


def reached_limit(config: TrainConfig, state: TrainState) -> str | None:
    """Return the limit on steps, epochs or samples that a run has reached, if any."""
    if config.max_steps is not None and state.step >= config.max_steps:
        return f"max_steps: {counted(config.max_steps, 'step')}"
    if config.max_epochs is not None and state.epoch >= config.max_epochs:
        return f"max_epochs: {counted(config.max_epochs, 'pass', 'passes')} over the data"
    return None


def is_due(config: TrainConfig, state: TrainState, every_steps: int) -> bool:
    """Return whether a step is one of every so many, or the last of a run that is too short to have one."""
    return state.step % every_steps == 0 or (state.step < every_steps and reached_limit(config, state) is not None)


def used_up_budget(config: TrainConfig, state: TrainState) -> str | None:
    """Return that the run's budget is reached, with the remedy; None if not. `with_hours` turns max_cost into hours."""
    if config.max_hours is None or state.seconds < config.max_hours * 3600:
        return None
    budgets = " or ".join(name for name in ("max_hours", "max_cost") if getattr(config, name) is not None)
    return f"{budgets} is reached; raise it to continue"


def last_step(config: TrainConfig, state: TrainState, rows: int, batch: int) -> int | None:
    """Return the step at which max_steps or max_epochs ends the run; None if neither is set."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.max_epochs is not None and state.epoch < config.max_epochs:
        full_epochs = config.max_epochs - state.epoch - 1
        ends.append(state.step + -(-(rows - state.position) // batch) + full_epochs * -(-rows // batch))
    return min(ends) if ends else None


def seconds_left(config: TrainConfig, state: TrainState, last: int | None, batch: int, rate: float) -> float:
    """Return the seconds to a run's end at a rate in samples a second; infinite if neither limits nor `last` tell."""
    left = [math.inf if last is None else (last - state.step) * batch / rate]
    if config.max_hours is not None:
        left.append(config.max_hours * 3600 - state.seconds)
    return max(0.0, min(left))
