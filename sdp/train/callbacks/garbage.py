"""Collects garbage at the same steps on all workers."""

import gc
from dataclasses import dataclass

from sdp.train.trainer import Callback, StepReport, Trainer


@dataclass
class CollectGarbage(Callback):
    """Replaces automatic collection, which would pause one worker at a time, and all others wait for that one."""

    every_steps: int = 100
    _unfreeze: bool = False

    def on_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._unfreeze = not gc.get_freeze_count()  # else it would undo the caller's freeze
        gc.collect()
        gc.freeze()  # existing objects stay, and need not be scanned again
        gc.disable()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        if report.step % self.every_steps == 0:
            gc.collect()

    def close(self) -> None:
        gc.enable()
        if self._unfreeze:
            gc.unfreeze()
