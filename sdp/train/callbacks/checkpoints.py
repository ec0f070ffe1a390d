"""Saves the run at regular steps."""

from dataclasses import dataclass

from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.trainer import Callback, StepReport, Trainer


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
