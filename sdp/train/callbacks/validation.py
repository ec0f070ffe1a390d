"""Measures the validation loss at regular steps."""

from dataclasses import dataclass

from torch.distributed.fsdp import FSDPModule

from sdp.config.train import TrainConfig
from sdp.train.data.batch import Batch
from sdp.train.limits import is_due
from sdp.train.trainer import Callback, StepReport, Trainer
from sdp.train.validation import load_validation_batch, measure, validation_rows


@dataclass
class MeasureValidationLoss(Callback):
    """Measures the validation loss, by timestep and overall, for the metrics; every worker measures its share.

    It uses the weights, not their moving average, for comparison with the training loss. The rows are read once and
    stay in memory.
    """

    config: TrainConfig
    _batch: Batch | None = None

    def on_start(self, trainer: Trainer) -> None:
        settings = self.config.evaluate
        latents, weigh = validation_rows(self.config)
        self._batch = load_validation_batch(
            latents, weigh, settings.rows, trainer.world, self.config.data.batch_size, trainer.reader.space
        )

    def on_compiled(self, trainer: Trainer) -> None:
        if self._batch is not None:
            self._measure(trainer, self._batch)  # without gradients, graphs are others than a step's

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        every = self.config.evaluate.every_steps
        if self._batch is not None and every is not None and is_due(self.config, trainer.state, every):
            trainer.gauges["validation"] = self._measure(trainer, self._batch)
            trainer.gauges["validation_step"] = report.step

    def _measure(self, trainer: Trainer, batch: Batch) -> dict[str, float]:
        losses = measure(
            trainer.networks,
            trainer.objective,
            trainer.conditioning,
            batch,
            batch_size=self.config.data.batch_size,
            world=trainer.world,
            forward=trainer.strategy.forward,
        )
        for module in trainer.networks.modules():  # without a backward pass, fsdp keeps the gathered weights
            if isinstance(module, FSDPModule):
                module.reshard()
        return losses
