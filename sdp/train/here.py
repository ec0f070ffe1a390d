"""Training in the driver's process, without Ray."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdp.config.train import TrainConfig
from sdp.console import Progress
from sdp.device import choose_device
from sdp.lease import Lease
from sdp.train.assemble import assemble
from sdp.train.callbacks.usual import make_callbacks
from sdp.train.driver import TrainSummary, failure_line, on_signals
from sdp.train.messages import progress_line
from sdp.train.plan import TrainPlan
from sdp.train.run_folder import RunFolder
from sdp.train.trainer import Callback, StepReport, StopRequest, Trainer
from sdp.train.world import World


def train_here(
    config: TrainConfig, plan: TrainPlan, folder: RunFolder, lease: Lease, on_progress: Callable[[], None]
) -> TrainSummary:
    """Train in this process; call `on_progress` before each line of progress."""

    def show(line: str) -> None:
        on_progress()
        progress.update(line)

    world, stop = World(device=choose_device()), StopRequest()
    folder.record("start", workers=(1, 1), from_step=plan.state.step)
    with Progress("train") as progress:
        callbacks = [*make_callbacks(config), FollowLease(lease, show, plan.last_step)]
        try:
            trainer = assemble(config, world, callbacks=callbacks, stop=stop, check=lease.confirm)
            with on_signals(lambda name: setattr(stop, "reason", name)):
                reason = trainer.train()
        except Exception as error:
            folder.record("gave_up", failures=[failure_line(error)])
            raise
    folder.record("end", reason=reason, step=trainer.state.step)
    return TrainSummary(config.output.uri, folder.checkpoint(trainer.state.step).uri, trainer.state, reason)


@dataclass
class FollowLease(Callback):
    """Ends training in the driver's process when another job has taken over the run, and shows the metrics."""

    lease: Lease
    show: Callable[[str], None]
    last_step: int | None

    def on_start(self, trainer: Trainer) -> None:
        workers = [f"{socket.gethostname()} pid {os.getpid()}"]
        trainer.checkpointer.run.record("training", from_step=trainer.state.step, workers=workers)

    def on_compile(self, trainer: Trainer, progress: str) -> None:  # noqa: ARG002
        self.lease.check()
        self.show(progress)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002 (each step)
        self.lease.check()

    def on_metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:  # noqa: ARG002
        self.show(progress_line(line, self.last_step))
