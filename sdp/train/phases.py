"""Two phases in one configuration: each is a separate run, and the second begins with the weights of the first.

    OUTPUT/phase-1, OUTPUT/phase-2        runs like any other, each with its checkpoints, events and metrics

The present phase is not recorded: the first continues until its newest checkpoint has reached its limits, or until the
second has a checkpoint. From then on only the second continues, even if the limits of the first are raised.
"""

from collections.abc import Sequence

from sdp.config.train import PHASES, TrainConfig
from sdp.datasets.audit import RUN
from sdp.errors import ConfigError, Problem
from sdp.model.checkpoints import TrainState
from sdp.storage import open_storage
from sdp.train.run_folder import RunFolder


def refuse_other_phases(config: TrainConfig) -> None:
    """Refuse to add or remove a second phase: the runs have other folders, so training would begin from scratch."""
    output = open_storage(config.output.uri, config.storage.options())
    two = config.phase_2.max_steps is not None
    if two and output.exists(RUN):
        stored = "a run of one phase"
        hint = "set it back, or choose another output.uri and set model.start_from to this run"
    elif not two and output.exists(f"{PHASES[0]}/{RUN}"):
        stored = "a run of two phases"
        hint = "set phase_2 back, or choose another output.uri and set model.start_from to one of its phases"
    else:
        return
    got = repr(config.phase_2.max_steps) if two else "null"
    raise ConfigError([Problem("phase_2.max_steps", f"what {output.uri} began with ({stored})", got, hint)])


def finished_phases(phases: Sequence[TrainConfig]) -> list[TrainState]:
    """Return the states of the phases that are finished because a later one has a checkpoint."""
    if len(phases) < 2:
        return []
    one, two = map(RunFolder.of, phases)
    return [] if two.newest() is None else [one.state()]


def with_hours(config: TrainConfig, earlier: TrainState) -> TrainConfig:
    """Return a phase's configuration with what the phase before has left of the budget as `max_hours`.

    Money becomes hours of all trainers and encoders that the job may have, so that it never costs more.
    """
    hours = [] if config.max_hours is None else [config.max_hours - earlier.seconds / 3600]
    prices = config.prices.hourly
    per_hour = config.scaling.most * prices.get("trainer_hour", 0.0)
    per_hour += config.encode.most * prices.get("encoder_hour", 0.0) * (config.data.mode == "online")
    if config.max_cost is not None and per_hour:
        state = RunFolder.of(config).state()
        left = config.max_cost - sum(each.cost(prices) for each in (earlier, state))
        hours.append(state.seconds / 3600 + left / per_hour)
    return config.replaced(max_hours=max(0.0, min(hours))) if hours else config
