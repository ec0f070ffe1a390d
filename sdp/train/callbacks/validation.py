"""Measures, every so many steps, the loss on rows that are not trained on."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from sdp.config import TrainConfig
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.data.batch import Batch
from sdp.train.validation import load_unseen, measure, unseen_of

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer


@dataclass
class MeasureUnseen(Callback):
    """All workers take their share; the figures go into the metrics, as `validation`: by timestep, and of all.

    They are of the weights as they are trained, to be compared with the loss of training. The rows are read once and
    stay in memory.
    """

    config: TrainConfig
    _batch: Batch | None = None

    def on_start(self, trainer: "Trainer") -> None:
        told = self.config.evaluate
        unseen = unseen_of(self.config, told.source)
        self._batch = load_unseen(unseen, told.rows, trainer.world, self.config.data.batch_size)

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        told = self.config.evaluate
        if told.every_steps is None or report.step % told.every_steps or self._batch is None:
            return
        began = time.perf_counter()
        found = measure(
            trainer.networks,
            trainer.objective,
            trainer.conditioning,
            self._batch,
            buckets=told.buckets,
            batch_size=self.config.data.batch_size,
            world=trainer.world,
            forward=trainer.strategy.forward,
        )
        for module in trainer.networks.modules():  # what a forward pass has gathered waits for its backward pass
            if isinstance(module, FSDPModule):
                module.reshard()
        trainer.gauges["validation"] = {**found.by_timestep, "all": found.mean}
        trainer.gauges["validation_step"] = report.step
        trainer.gauges["validation_seconds"] = round(time.perf_counter() - began, 3)
