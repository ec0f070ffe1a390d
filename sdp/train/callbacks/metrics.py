"""Writes a line of metrics at regular steps, for the steps since the previous line."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from sdp import hardware
from sdp.families import flops, space_of
from sdp.model.load import load_denoiser_config
from sdp.model.sources import resolve
from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.limits import last_step, seconds_left
from sdp.train.metrics_log import MetricsLog
from sdp.train.trainer import Callback, StepReport, Trainer

_WRITE_S, _WRITE_HERE_S = 60.0, 10.0
"""Seconds between writes to a bucket, and to a disk, which costs nothing."""
_RECENT = 30
"""Lines from whose speed the end is forecast."""


@dataclass
class RecordMetrics(Callback):
    """Records metrics and the trainers' hours on the main worker, and hands each line to all callbacks.

    They are written once a minute, to a disk more often, with checkpoints and at the end.
    """

    every_steps: int
    _log: MetricsLog | None = None
    _flops: float = 0.0
    """The U-Net's FLOPs for a sample, forward and backward; counted on a GPU only, since it takes some seconds."""
    _steps: list[StepReport] = field(default_factory=list)
    """The steps since the previous line."""
    _lines: int = 0
    _recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Samples and seconds of recent lines."""
    _saving: float = 0.0
    _written_at: float = 0.0
    _write_s: float = _WRITE_S

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.is_main:
            # Steps after the checkpoint are repeated, and their lines replace the earlier ones.
            run = trainer.checkpointer.run
            self._log = MetricsLog(run.storage, trainer.state.step, run.check)
            self._written_at = time.monotonic()
            if run.storage.uri.startswith("/"):
                self._write_s = _WRITE_HERE_S
            if trainer.world.device.type == "cuda":
                config = trainer.config
                model = resolve(config.model.source, storage=config.storage.options())
                side = space_of(model.path).shape(config.data.resolution)[1]
                denoiser = load_denoiser_config(model.path)
                self._flops = flops(model.family, denoiser, side, config.objective.skipped_tokens)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if self._log is None:
            return
        world = trainer.world
        trainer.state.bill(report.seconds, trainers=world.size, gpu=world.device.type == "cuda")
        self._steps.append(report)
        if report.step % self.every_steps == 0:
            self._add_line(trainer, report, self._log)
        if trainer.save_wanted or time.monotonic() - self._written_at > self._write_s:
            self._log.publish()  # with the checkpoint, so that a job that resumes from it has all earlier lines
            self._written_at = time.monotonic()

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:  # noqa: ARG002
        self._saving += saved.seconds
        if self._log is not None:
            self._log.publish()

    def on_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        if self._log is not None:
            self._log.finish()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _add_line(self, trainer: Trainer, report: StepReport, log: MetricsLog) -> None:
        """Add a line about the steps since the last one to the log, and pass it to the callbacks."""
        steps, self._steps = self._steps, []
        state, world = trainer.state, trainer.world
        good = [step for step in steps if step.verdict == "good"]
        samples, seconds = sum(step.samples for step in good), sum(step.seconds for step in steps)
        rate = samples / seconds if seconds else 0.0
        names = dict.fromkeys(name for step in steps for name in step.parts)
        line: dict[str, Any] = {
            "step": report.step,
            "epoch": report.epoch,
            "epoch_done": round(report.epoch_done, 6),
            "samples": state.samples,
            "loss": fmean(step.loss for step in good) if good else None,
            "loss_smoothed": state.loss,
            "gradient_norm": report.norm if math.isfinite(report.norm) else None,
            "learning_rate": report.learning_rate,
            "skipped": state.skipped,
            "samples_per_s": round(rate, 3),
            "samples_per_s_per_worker": round(rate / world.size, 3),
            "workers": world.size,
            "seconds": round(state.seconds, 3),
            "step_seconds": round(seconds / len(steps), 6),
            "time": {name: round(fmean(step.parts.get(name, 0.0) for step in steps), 6) for name in names},
        }
        line |= self._forecast(trainer, samples, seconds)
        line |= trainer.gauges
        line["time"]["checkpoint"] = round(self._saving / len(steps), 6)
        self._saving = 0.0
        if world.device.type == "cuda":
            line["memory_peak"] = torch.cuda.max_memory_allocated()
            gpu = hardware.gpu_by_product(torch.cuda.get_device_name())
            line["mfu"] = hardware.mfu(self._flops * samples, seconds, gpu, world.size)
        log.add(line)
        for callback in trainer.callbacks:
            callback.on_metrics(trainer, line)

    def _forecast(self, trainer: Trainer, samples: int, seconds: float) -> dict[str, float]:
        """Return the GPU-hours so far, and the time left until the run ends, as far as known."""
        state, recent = trainer.state, self._recent
        figures = {"gpu_hours": round(state.gpu_hours, 4)} if state.gpu_hours else {}
        if self._lines == 1:
            recent.clear()  # the first line includes compilation and warm-up
        self._lines += 1
        recent.append((samples, seconds))
        samples, seconds = (sum(column) for column in zip(*recent, strict=True))
        if samples:
            rate, batch = samples / seconds, trainer.batch_size
            last = last_step(trainer.config, state, trainer.reader.plan.positions(state.start), batch)
            left_s = seconds_left(trainer.config, state, last, batch, rate)
            if math.isfinite(left_s):
                figures |= {"left_s": round(left_s, 4), "finish_time": round(time.time() + left_s)}
        return figures
