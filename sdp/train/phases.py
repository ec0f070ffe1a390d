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
