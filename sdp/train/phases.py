"""Two phases as one configuration: each is a run of its own, and the second begins with what the first has learned.

    OUTPUT/phase-1, OUTPUT/phase-2        runs like any other, each with its checkpoints, events and metrics

Which phase a job is in is not kept anywhere: the first is gone on with until it has reached its end, which its newest
checkpoint tells. So a job that is run again in its second phase finds the first one done and goes on with the second.
"""

from typing import Any

from sdp.config import TrainConfig
from sdp.config.train import SecondPhaseConfig
from sdp.storage.uri import join
from sdp.train.state import TrainState


def phases_of(config: TrainConfig) -> list[TrainConfig]:
    """The runs of a configuration, in order."""
    second = config.phase_2
    if second.max_steps is None:
        return [config]
    one, two = (join(config.output.uri, f"phase-{number}") for number in (1, 2))
    alone: dict[str, Any] = {"phase_2": SecondPhaseConfig()}
    first = config.model_copy(update={**alone, "output": _with(config.output, uri=one)})
    data = _with(
        config.data,
        resolution=second.resolution,
        batch_size=second.batch_size,
        global_batch_size=second.global_batch_size,
    )
    changes = {
        **alone,
        "source": _with(config.source, uri=second.source),
        "output": _with(config.output, uri=two),
        "model": _with(config.model, start_from=one, start_optimizer=second.keep_optimizer),
        "data": data,
        "optimizer": _with(config.optimizer, learning_rate=second.learning_rate, warmup_steps=second.warmup_steps),
        "max_steps": second.max_steps,
        "max_epochs": None,
        "max_samples": None,
    }
    return [first, config.model_copy(update=changes)]


def with_budget_left(config: TrainConfig, spent: TrainState) -> TrainConfig:
    """A phase with what earlier ones have left of the budget."""
    left: dict[str, float] = {}
    if config.max_hours is not None:
        left["max_hours"] = max(1e-9, config.max_hours - spent.seconds / 3600)
    if config.max_cost is not None:
        left["max_cost"] = max(1e-9, config.max_cost - spent.cost)
    return config.model_copy(update=left)


def _with(section: Any, **changes: Any) -> Any:
    """A section with the keys changed that are given."""
    return section.model_copy(update={name: value for name, value in changes.items() if value is not None})
