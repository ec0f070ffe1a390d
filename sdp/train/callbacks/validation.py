"""Measures the validation loss at regular steps."""

from dataclasses import dataclass

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
        rows, size = self.config.evaluate.rows, self.config.data.batch_size
        latents, weigh = validation_rows(self.config)
        self._batch = load_validation_batch(latents, weigh, rows, trainer.world, size, trainer.reader.space)

    def on_compiled(self, trainer: Trainer) -> None:
        if self._batch is not None:
            measure(trainer, self._batch)  # without gradients, graphs are others than a step's

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        every = self.config.evaluate.every_steps
        if self._batch is not None and every is not None and is_due(self.config, trainer.state, every):
            trainer.gauges["validation"] = measure(trainer, self._batch)
            trainer.gauges["validation_step"] = report.step
