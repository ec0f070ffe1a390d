"""Exports metrics: each worker its own figures, the main worker also those of the run."""

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch

from sdp.datasets.outcomes import Outcome
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
    """Sums figures up and exports them once a second, so that steps do not wait for it."""

    telemetry: Telemetry
    recoveries: int = 0
    _parts: dict[str, float] = field(default_factory=dict)
    _steps: int = 0
    _samples: int = 0
    _bad: list[Outcome] = field(default_factory=list)
    _bad_reported: int = 0
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
        self._report(trainer, trainer.state.epoch + trainer.state.position / trainer.reader.rows)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self._steps += 1
        self._samples += report.samples if report.verdict == "good" else 0
        for part, seconds in report.parts.items():
            self._parts[part] = self._parts.get(part, 0.0) + seconds
        if self._bad is not trainer.bad:  # a checkpoint has begun a new list
            self._bad, self._bad_reported = trainer.bad, 0
        self.telemetry.count("sdp_train_bad_rows_total", len(self._bad) - self._bad_reported, rank=trainer.world.rank)
        self._bad_reported = len(self._bad)
        if time.monotonic() - self._reported_at > _EVERY_S:
            self._report(trainer, report.epoch + report.epoch_done)

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:
        self._parts["checkpoint"] = self._parts.get("checkpoint", 0.0) + saved.seconds
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
        self._report(trainer, trainer.state.epoch + trainer.state.position / trainer.reader.rows)

    def _report(self, trainer: Trainer, epoch: float) -> None:
        telemetry, world, state = self.telemetry, trainer.world, trainer.state
        self._reported_at = time.monotonic()
        for part, seconds in self._parts.items():
            telemetry.count("sdp_train_rank_seconds_total", seconds, rank=world.rank, part=part)
        self._parts.clear()
        if world.device.type == "cuda":
            for kind, amount in (
                ("allocated", torch.cuda.memory_allocated()),
                ("reserved", torch.cuda.memory_reserved()),
                ("peak", torch.cuda.max_memory_allocated()),
            ):
                telemetry.show("sdp_train_gpu_memory_bytes", amount, rank=world.rank, kind=kind)
        if world.is_main:
            telemetry.count("sdp_train_steps_total", self._steps)
            telemetry.count("sdp_train_samples_total", self._samples)
            telemetry.show("sdp_train_step", state.step)
            telemetry.show("sdp_train_samples_seen", state.samples)
            telemetry.show("sdp_train_epoch", epoch)
            telemetry.show("sdp_train_cost", state.cost(trainer.config.prices.hourly) or None)
        self._steps = self._samples = 0
