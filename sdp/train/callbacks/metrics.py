"""Writes a line of metrics at regular steps, for the steps since the previous line."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from sdp import hardware
from sdp.model.family import unet_flops
from sdp.model.load import load_unet_config
from sdp.model.sources import resolve
from sdp.train.checkpoint import Checkpoint
from sdp.train.limits import last_step, seconds_left
from sdp.train.metrics_log import MetricsLog
from sdp.train.trainer import Callback, StepReport, Trainer

_WRITE_S = 60.0
_RECENT = 30
"""Lines from whose speed the end is forecast."""


@dataclass
class Meter:
    """The sums of some steps."""

    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    skipped: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.seconds += report.seconds
        for name, seconds in report.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds
        if report.verdict == "good":
            self.samples += report.samples
            self.loss += report.loss
        else:
            self.skipped += 1


@dataclass
class RecordMetrics(Callback):
    """Records metrics on the main worker, and hands each line to all callbacks.

    They are written once a minute, with checkpoints and at the end.
    """

    every_steps: int
    _log: MetricsLog | None = None
    _flops: float = 0.0
    """The U-Net's FLOPs for a sample, forward and backward; counted on a GPU only, since it takes some seconds."""
    _meter: Meter = field(default_factory=Meter)
    _first: Meter | None = None
    _recent: deque[Meter] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _saving: float = 0.0
    _written_at: float = 0.0

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.is_main:
            # Steps after the checkpoint are repeated, and their lines replace the earlier ones.
            run = trainer.checkpointer.run
            self._log = MetricsLog(run.storage, trainer.state.step, run.check)
            self._written_at = time.monotonic()
            if trainer.world.device.type == "cuda":
                config = trainer.config
                model = resolve(config.model.source, storage=config.storage.options())
                self._flops = unet_flops(load_unet_config(model.path), config.data.resolution)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if self._log is None:
            return
        self._meter.add(report)
        if report.step % self.every_steps == 0:
            self._line(trainer, report, self._log)
        if trainer.save_wanted or time.monotonic() - self._written_at > _WRITE_S:
            self._log.publish()  # with the checkpoint, so that a job that resumes from it has all earlier lines
            self._written_at = time.monotonic()

    def on_checkpoint(self, trainer: Trainer, saved: Checkpoint) -> None:  # noqa: ARG002
        self._saving += saved.seconds
        if self._log is not None:
            self._log.publish()

    def on_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        if self._log is not None:
            self._log.finish()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _line(self, trainer: Trainer, report: StepReport, log: MetricsLog) -> None:
        meter, self._meter = self._meter, Meter()
        state, world = trainer.state, trainer.world
        good = meter.steps - meter.skipped
        rate = meter.samples / meter.seconds if meter.seconds else 0.0
        line: dict[str, Any] = {
            "step": report.step,
            "epoch": report.epoch,
            "epoch_done": round(report.epoch_done, 6),
            "samples": state.samples,
            "loss": meter.loss / good if good else None,
            "loss_smoothed": state.loss,
            "gradient_norm": report.norm if math.isfinite(report.norm) else None,
            "learning_rate": report.learning_rate,
            "skipped": state.skipped,
            "samples_per_s": round(rate, 3),
            "samples_per_s_per_worker": round(rate / world.size, 3),
            "workers": world.size,
            "seconds": round(state.seconds, 3),
            "step_seconds": round(meter.seconds / meter.steps, 6),
            "time": {name: round(seconds / meter.steps, 6) for name, seconds in meter.parts.items()},
        }
        line |= self._forecast(trainer, meter)
        line |= trainer.gauges
        line["time"]["checkpoint"] = round(self._saving / meter.steps, 6)
        self._saving = 0.0
        if world.device.type == "cuda":
            line["memory_allocated"] = torch.cuda.memory_allocated()
            line["memory_peak"] = torch.cuda.max_memory_allocated()
            gpu = hardware.gpu_by_product(torch.cuda.get_device_name())
            line["mfu"] = hardware.mfu(self._flops * meter.samples, meter.seconds, gpu, world.size)
        log.add(line)
        for callback in trainer.callbacks:
            callback.on_metrics(trainer, line)

    def _forecast(self, trainer: Trainer, meter: Meter) -> dict[str, float]:
        """Return the GPU-hours so far, and the time left until the run ends, as far as known."""
        state, recent = trainer.state, self._recent
        figures = {"gpu_hours": round(state.gpu_hours, 4)} if state.gpu_hours else {}
        if len(recent) == 1 and recent[0] is self._first:
            recent.clear()  # the first line includes compilation and warm-up
        self._first = self._first or meter
        recent.append(meter)
        if samples := sum(step.samples for step in recent):
            rate, batch = samples / sum(step.seconds for step in recent), trainer.batch_size
            last = last_step(trainer.config, state, trainer.reader.positions(state.start), batch)
            left_s = seconds_left(trainer.config, state, last, batch, rate)
            if math.isfinite(left_s):
                figures |= {"left_s": round(left_s, 4), "finish_time": round(time.time() + left_s)}
        return figures
