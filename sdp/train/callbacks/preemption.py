"""Saves the run when a node is about to be taken away."""

from collections.abc import Callable
from dataclasses import dataclass

from sdp.train.trainer import Callback, StepReport, Trainer

EVERY_STEPS = 20
"""Steps between checks, each of which is a collective; a spot notice comes two minutes ahead."""


@dataclass
class SaveBeforePreemption(Callback):
    """Saves an extra checkpoint on notice that a trainer's node will be lost. Training continues until then."""

    is_near: Callable[[], bool]
    """Returns whether a node will be lost: all workers ask at the same step and get the same answer."""
    every_steps: int = EVERY_STEPS
    _saved: bool = False

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if self._saved or report.step % self.every_steps:
            return
        if self.is_near():
            self._saved = trainer.save_wanted = True
            if trainer.world.is_main:
                trainer.checkpointer.run.record("preemption", step=report.step)
