"""Saves the run when a node is about to be taken away, so that what it has learnt by then does not go with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdp.train.callbacks.base import Callback, StepReport

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer

EVERY_STEPS = 20
"""All workers meet to agree on the answer, so not each step asks; a spot notice is two minutes ahead."""


@dataclass
class SaveBeforePreemption(Callback):
    """One checkpoint more when a trainer's node is to go. Training goes on until it is gone."""

    is_near: Callable[[], bool]
    """Whether a node is to go: every worker asks at the same step, and all get one answer."""
    every_steps: int = EVERY_STEPS
    _saved: bool = False

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        if self._saved or report.step % self.every_steps:
            return
        if self.is_near():
            self._saved = trainer.save_wanted = True
            if trainer.world.is_main:
                trainer.checkpointer.run.record("preemption", step=report.step)
