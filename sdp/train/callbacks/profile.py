"""Profiles a few steps: OUTPUT/profile/ has a summary, torch's trace and, of a GPU, the history of its memory."""

import gzip
import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from sdp.console import counted, size, table
from sdp.model.checkpoints import kind_of
from sdp.train.optimizer import shard
from sdp.train.run_folder import PROFILE
from sdp.train.stopwatch import MeasuredSpan
from sdp.train.trainer import Callback, StepReport, Trainer

log = logging.getLogger(__name__)

TRACE, MEMORY = "profile/trace.json.gz", "profile/memory.pickle"
_OPERATIONS = 25
"""Operations in the summary, the longest first."""


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
        if self._profiler is not None and self._seen == self.start:  # its warm-up is over
            trainer.stopwatch.spans = []

    def on_end(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        if self._profiler is not None and self._seen > self.start:
            self._end(trainer)
        elif self._seen <= self.start:
            why = f"this job had {counted(self._seen, 'step')}, and the first {self.start} are not profiled"
            trainer.checkpointer.run.record("no_profile", reason=why)
            log.warning("nothing was profiled: %s", why)

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
        if trainer.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history()
        self._profiler.start()

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def _end(self, trainer: Trainer) -> None:
        spans, trainer.stopwatch.spans = trainer.stopwatch.spans or [], None
        run, cuda, steps = trainer.checkpointer.run, trainer.world.device.type == "cuda", self._seen - self.start
        if cuda:
            torch.cuda.synchronize()
        profiler = self._stop()
        with TemporaryDirectory(prefix="sdp-profile-") as scratch:
            file = Path(scratch) / "trace.json"
            profiler.export_chrome_trace(str(file))
            run.storage.publish(TRACE, gzip.compress(file.read_bytes(), 3))
            if cuda:
                torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
                run.storage.publish(MEMORY, file.read_bytes())
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        parts = [
            f"step {trainer.state.step}, {counted(steps, 'step')} on {trainer.world.device}, "
            + ", ".join(f"{kind} {size(count)}" for kind, count in state_bytes(trainer).items()),
            phases(spans, steps),
            profiler.key_averages().table(sort_by=order, row_limit=_OPERATIONS, max_name_column_width=60),
        ]
        run.storage.publish(PROFILE, "\n\n".join(parts).encode())
        run.record("profile", step=trainer.state.step, uri=run.storage.uri_of(PROFILE))
        log.info("profiled %d steps: %s", steps, run.storage.uri_of(PROFILE))


def phases(spans: "list[MeasuredSpan]", steps: int) -> str:
    """Return a table of a step's activities: their mean time, and the most memory that was allocated in them."""
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for span in spans:
        seconds[span.activity] = seconds.get(span.activity, 0.0) + span.seconds()
        peaks[span.activity] = max(peaks.get(span.activity, 0), span.peak_bytes)
    whole = sum(seconds.values()) or 1.0
    rows = [
        (name, f"{1e3 * spent / steps:,.2f}", f"{spent / whole:.1%}", size(peaks[name]) if peaks[name] else "")
        for name, spent in seconds.items()
    ]
    rows.append(("all", f"{1e3 * whole / steps:,.2f}", "", ""))
    return table(rows, ("phase", "ms a step", "share", "peak memory"))


def state_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of this worker's share of weights, moving average and AdamW's moments."""
    sizes = {"weights": 0, "average": 0, "optimizer": 0}
    for name, tensor in trainer.tensors().items():
        sizes[kind_of(name)] += shard(tensor).nbytes
    return sizes
