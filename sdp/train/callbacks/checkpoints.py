"""Saves the run at regular steps, and when a node is about to be taken away."""

from collections.abc import Callable
from dataclasses import dataclass

from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.trainer import Callback, StepReport, Trainer

LOOK_EVERY = 20
"""Steps between checks, each of which is a collective; a spot notice comes two minutes ahead."""


@dataclass
class SaveCheckpoints(Callback):
    """Saves a checkpoint every `every_steps` steps, and records it in the run's events."""

    every_steps: int

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.every_steps == 0:
            trainer.save_wanted = True

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:
        if trainer.world.is_main:
            trainer.checkpointer.run.record(
                "checkpoint",
                step=saved.state.step,
                uri=saved.folder.uri,
                seconds=round(saved.seconds, 3),
                whole_s=round(saved.whole_s, 3),
                workers=trainer.world.size,
            )


@dataclass
class SaveBeforePreemption(Callback):
    """Saves an extra checkpoint on notice that a trainer's node will be lost. Training continues until then."""

    is_near: Callable[[], bool]
    """Returns whether a node will be lost: all workers ask at the same step and get the same answer."""
    _saved: bool = False

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if self._saved or report.step % LOOK_EVERY:
            return
        if self.is_near():
            self._saved = trainer.save_wanted = True
            if trainer.world.is_main:
                trainer.checkpointer.run.record("preemption", step=report.step)
