"""Ends a worker that has made no progress for too long, with its stacks in its log."""

import faulthandler
from dataclasses import dataclass

from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.trainer import Callback, StepReport, Trainer

WATCHDOG_S = 1800.0
"""The longest time without a first step: compiling and a first read of slow storage take less."""
_STDERR = 2


@dataclass
class Watchdog(Callback):
    """Writes the stacks of all threads to stderr when steps stay away for too long, and ends the process.

    Every worker has one: when a collective hangs, all workers hang, and each shows its own side of it. Python's timer
    also works where native code holds its lock.
    """

    seconds: float
    """The longest time until the first step is done, which may compile."""
    then: float
    """The longest time without a later step or checkpoint."""

    def on_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._restart(self.seconds)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        self._restart(self.then)

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:  # noqa: ARG002
        self._restart(self.then)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _restart(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
