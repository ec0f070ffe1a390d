"""Exports metrics: each worker its own figures, the main worker also those of the run."""

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

from sdp.model.checkpoints import read_marker
from sdp.telemetry import Telemetry
from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.run_folder import RunFolder
from sdp.train.trainer import Callback, StepReport, Trainer

_EVERY_S = 1.0

_LINE = {
    "loss": "sdp_train_loss",
    "loss_smoothed": "sdp_train_loss_smoothed",
    "gradient_norm": "sdp_train_gradient_norm",
    "learning_rate": "sdp_train_learning_rate",
    "workers": "sdp_train_workers",
    "skipped": "sdp_train_skipped_steps",
    "mfu": "sdp_train_mfu",
    "gpu_hours": "sdp_train_gpu_hours",
    "finish_time": "sdp_train_finish_time_seconds",
    "encoders": "sdp_train_encoders",
    "encoders_busy": "sdp_train_encoders_busy",
}
"""Fields of a metrics line, and their metrics."""


@dataclass
class EmitMetrics(Callback):
    """Exports counters at each step, and gauges once a second, so that steps do not wait for them."""

    telemetry: Telemetry
    recoveries: int = 0
    _reported_at: float = 0.0

    def on_metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:  # noqa: ARG002
        for name, metric in _LINE.items():
            self.telemetry.show(metric, line.get(name))
        for timesteps, loss in line.get("validation", {}).items():
            self.telemetry.show("sdp_train_validation_loss", loss, timesteps=timesteps)
        if "encoded" in line:
            self.telemetry.reach("sdp_train_encoded_total", line["encoded"])

    def on_start(self, trainer: Trainer) -> None:
        self.telemetry.process("trainer", trainer.world.rank)
        if trainer.world.is_main:
            self.telemetry.show("sdp_train_info", 1, data_mode=trainer.config.data.mode)
            self.telemetry.show("sdp_train_recoveries", self.recoveries)
            self._report_checkpoint(trainer.checkpointer.run)
        self._report(trainer, trainer.state.epoch + trainer.state.position / trainer.reader.plan.rows)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        for part, seconds in report.parts.items():
            self.telemetry.count("sdp_train_rank_seconds_total", seconds, rank=trainer.world.rank, part=part)
        self.telemetry.count("sdp_train_bad_rows_total", report.bad, rank=trainer.world.rank)
        if trainer.world.is_main:
            self.telemetry.count("sdp_train_steps_total", 1)
            self.telemetry.count("sdp_train_samples_total", report.samples if report.verdict == "good" else 0)
        if time.monotonic() - self._reported_at > _EVERY_S:
            self._report(trainer, report.epoch + report.epoch_done)

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:
        rank = trainer.world.rank
        self.telemetry.count("sdp_train_rank_seconds_total", saved.seconds, rank=rank, part="checkpoint")
        if trainer.world.is_main:
            self.telemetry.show("sdp_train_checkpoint_step", saved.state.step)
            self.telemetry.show("sdp_train_checkpoint_time_seconds", time.time())
            self.telemetry.show("sdp_train_checkpoint_seconds", saved.seconds)
            self.telemetry.show("sdp_train_ledger_difference", saved.state.consumed - saved.ledger_rows)

    def _report_checkpoint(self, run: RunFolder) -> None:
        """Export the checkpoint from which the run resumes: the next one may be a while off."""
        step = run.latest()
        if step is not None:
            created = datetime.fromisoformat(read_marker(run.checkpoint(step))["created"])
            self.telemetry.show("sdp_train_checkpoint_step", step)
            self.telemetry.show("sdp_train_checkpoint_time_seconds", created.timestamp())

    def on_end(self, trainer: Trainer) -> None:
        self._report(trainer, trainer.state.epoch + trainer.state.position / trainer.reader.plan.rows)

    def _report(self, trainer: Trainer, epoch: float) -> None:
        telemetry, world, state = self.telemetry, trainer.world, trainer.state
        self._reported_at = time.monotonic()
        if world.device.type == "cuda":
            for kind, amount in (
                ("allocated", torch.cuda.memory_allocated()),
                ("reserved", torch.cuda.memory_reserved()),
                ("peak", torch.cuda.max_memory_allocated()),
            ):
                telemetry.show("sdp_train_gpu_memory_bytes", amount, rank=world.rank, kind=kind)
        if world.is_main:
            telemetry.show("sdp_train_step", state.step)
            telemetry.show("sdp_train_samples_seen", state.samples)
            telemetry.show("sdp_train_epoch", epoch)
            telemetry.show("sdp_train_cost", state.cost(trainer.config.prices.hourly) or None)
