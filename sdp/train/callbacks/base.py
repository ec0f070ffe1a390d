"""What a callback can do: one class a file, and the trainer knows none of them by name."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdp.train.optimizer import Verdict
    from sdp.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step came to; the same on all workers but for the times."""

    step: int
    epoch: int
    epoch_done: float
    """Share of the epoch that is consumed."""
    samples: int
    """Of this step, over all workers."""
    loss: float
    norm: float
    """Of the gradient, before clipping."""
    learning_rate: float
    verdict: "Verdict"
    seconds: float
    """From the end of the step before, data and all."""
    parts: dict[str, float]
    """Seconds by activity: data, copy, forward, backward, optimizer."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete; the trainer may be some steps ahead of it by now."""

    uri: str
    step: int
    seconds: float
    """That the loop stood still for it."""
    whole_s: float
    """From its begin until it was complete."""
    samples: int
    """Counted up to it."""
    ledger_rows: int
    """Held by its ledger; on the main worker."""


class Callback:
    """Called by the trainer on every worker; what only one shall do asks `trainer.world.is_main`."""

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step, with the state restored; `trainer.resumed` tells whether there was one."""

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        """After each step."""

    def on_checkpoint(self, trainer: "Trainer", saved: Saved) -> None:
        """After each checkpoint, when it is complete; on workers other than the main one when all have written."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last step and its checkpoint; `trainer.reason` says why it was the last."""

    def close(self) -> None:
        """At the very end, also after an error."""
