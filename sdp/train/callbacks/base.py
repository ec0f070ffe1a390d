"""The interface of callbacks. Each has its own file, and the trainer knows none of them by name."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdp.train.optimizer import Verdict
    from sdp.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Update:
    """The figures of an optimizer step, the same on all workers."""

    loss: float
    norm: float
    """The gradient's norm before clipping."""
    samples: int
    """Samples of this step, over all workers."""
    learning_rate: float
    verdict: "Verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Update):
    """The result of a step; the same on all workers except for the times."""

    step: int
    epoch: int
    epoch_done: float
    """The consumed share of the epoch."""
    seconds: float
    """Time since the end of the previous step, waiting for data included."""
    parts: dict[str, float]
    """Seconds by activity: data, copy, forward, backward, optimizer."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint; the trainer may be some steps ahead of it."""

    uri: str
    step: int
    seconds: float
    """Time for which training stood still."""
    whole_s: float
    """Time from its beginning until it was complete."""
    samples: int
    """Samples consumed up to it."""
    ledger_rows: int
    """Rows in its ledger; only on the main worker."""


class Callback:
    """An observer of training. Every worker calls it; `trainer.world.is_main` tells the main worker."""

    def on_start(self, trainer: "Trainer") -> None:
        """Run before the first step, after the state is restored."""

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        """Run after each step."""

    def on_checkpoint(self, trainer: "Trainer", saved: Saved) -> None:
        """Run when a checkpoint is complete, or on other workers than the main one when all have written it."""

    def on_end(self, trainer: "Trainer") -> None:
        """Run after the last step and its checkpoint; `trainer.reason` says why training ended."""

    def close(self) -> None:
        """Run at the very end, also after an error."""
