"""Profiles a few steps: OUTPUT/profile/trace.json.gz, summary.json and timeline.svg."""

import gzip
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from sdp.console import counted
from sdp.model.checkpoints import kind_of
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.optimizer import shard
from sdp.train.profile import summarize
from sdp.train.timeline import PICTURE, SUMMARY, drawing
from sdp.train.trainer import Trainer

log = logging.getLogger(__name__)

TRACE = "profile/trace.json.gz"


@dataclass
class Profile(Callback):
    """Runs torch's profiler on the main worker over `steps` steps, after the first `start` of this job.

    It must be the last callback, so that the steps include the time of the others.
    """

    steps: int
    start: int = 10
    _seen: int = 0
    _profiler: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.is_main and self.start == 1:
            self._begin(trainer)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        if not trainer.world.is_main:
            return
        self._seen += 1
        if self._profiler is not None:
            if self._seen == self.start + self.steps:
                self._end(trainer)
            else:
                self._profiler.step()
        elif self._seen == self.start - 1:
            self._begin(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        if self._profiler is not None and self._seen > self.start:
            self._end(trainer)
        elif self._seen <= self.start:
            why = f"this job had {counted(self._seen, 'step')}, and profile.start skips the first {self.start}"
            trainer.checkpointer.run.record("no_profile", reason=why)
            log.warning("nothing was profiled: %s; lower it", why)

    def close(self) -> None:
        self._stop()

    def _begin(self, trainer: Trainer) -> None:
        """Start the profiler; the next step is its own warm-up."""
        activities = [ProfilerActivity.CPU]
        if trainer.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            profile_memory=True,
        )
        self._profiler.start()
        trainer.stopwatch.annotate = True

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def _end(self, trainer: Trainer) -> None:
        trainer.stopwatch.annotate = False
        cuda = trainer.world.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        profiler = self._stop()
        with TemporaryDirectory(prefix="sdp-profile-") as scratch:
            file = Path(scratch) / "trace.json"
            profiler.export_chrome_trace(str(file))
            content = file.read_bytes()
        summary = summarize(json.loads(content), torch.cuda.get_device_name() if cuda else "CPU")
        summary |= {"last_step": trainer.state.step, "workers": trainer.world.size, "state_bytes": state_bytes(trainer)}
        run = trainer.checkpointer.run
        run.storage.publish(TRACE, gzip.compress(content, 3))
        run.storage.publish(PICTURE, drawing(summary, alone=True).encode())
        run.storage.publish(SUMMARY, json.dumps(summary, indent=1).encode())
        run.record("profile", step=trainer.state.step, uri=run.storage.uri_of(SUMMARY))
        log.info("profiled %d steps: %s", summary["steps"], run.storage.uri_of(PICTURE))


def state_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of this worker's share of weights, moving average and AdamW's moments."""
    sizes = {"weights": 0, "average": 0, "optimizer": 0}
    for name, tensor in trainer.tensors().items():
        sizes[kind_of(name)] += shard(tensor).nbytes
    return sizes
