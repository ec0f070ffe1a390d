"""Profiles a few steps: OUTPUT/profile/ has a summary, torch's trace and, of a GPU, the history of its memory."""

import gzip
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import profile, schedule

from sdp.console import counted, size, table
from sdp.train.run_folder import PROFILE
from sdp.train.trainer import Callback, StepReport, Trainer

log = logging.getLogger(__name__)

TRACE, MEMORY = "profile/trace.json.gz", "profile/memory.pickle"
_OPERATIONS = 25
"""Operations in the summary, the longest first."""


@dataclass
class Profile(Callback):
    """Runs torch's profiler on the main worker over `steps` steps, after the first `start` of this job."""

    steps: int
    start: int = 10
    _profiler: Any = None
    _seconds: dict[str, float] = field(default_factory=dict)
    """The profiled steps' time by activity."""
    _step_s: float = 0.0
    """The profiled steps' time."""
    _encode_s: float = 0.0
    """Time of encoding since this job began."""

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        self._profiler = profile(
            schedule=schedule(wait=self.start - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda _: self._write(trainer),
            profile_memory=True,
        )
        self._profiler.start()
        trainer.stopwatch.peaks = {}  # from the start, since the encoder may not work in the profiled steps

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if self._profiler is None:
            return
        self._encode_s += report.parts.get("encode", 0.0)
        if self._profiler.step_num >= self.start:
            self._step_s += report.seconds
            for activity, seconds in report.parts.items():
                self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds
        self._profiler.step()
        if self._profiler.step_num == self.start and trainer.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history()

    def on_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        if self._profiler is None:
            return
        self._profiler.stop()  # writes what there is, unless it is written
        if self._profiler.step_num <= self.start:
            log.warning("nothing was profiled: the first %d steps of a job are not", self.start)
        self._profiler = None

    def close(self) -> None:
        if self._profiler is not None:  # after an error
            self._profiler.on_trace_ready = None
            self._profiler.stop()

    def _write(self, trainer: Trainer) -> None:
        peaks, trainer.stopwatch.peaks = trainer.stopwatch.peaks or {}, None
        run, cuda = trainer.checkpointer.run, trainer.world.device.type == "cuda"
        steps = self._profiler.step_num - self.start
        if steps <= 0:
            return
        with TemporaryDirectory(prefix="sdp-profile-") as scratch:
            file = Path(scratch) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            run.storage.publish(TRACE, gzip.compress(file.read_bytes(), 3))
            if cuda:
                torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
                run.storage.publish(MEMORY, file.read_bytes())
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        parts = [
            f"step {trainer.state.step}, {counted(steps, 'step')} on {trainer.world.device}",
            phases(self._spread(trainer, steps), peaks, steps, self._step_s),
            self._profiler.key_averages().table(sort_by=order, row_limit=_OPERATIONS, max_name_column_width=60),
        ]
        run.storage.publish(PROFILE, "\n\n".join(parts).encode())
        run.record("profile", step=trainer.state.step, uri=run.storage.uri_of(PROFILE))
        log.info("profiled %d steps: %s", steps, run.storage.uri_of(PROFILE))

    def _spread(self, trainer: Trainer, steps: int) -> dict[str, float]:
        """Return the profiled steps' time by activity, with that of encoding, which comes in bursts, for their rows."""
        seconds = {**self._seconds, "other": max(0.0, self._step_s - sum(self._seconds.values()))}
        if encoded := trainer.stopwatch.encoded:
            rows = steps * -(-trainer.batch_size // trainer.world.size)
            seconds = {"encode": 0.0, **seconds} | {"encode": self._encode_s * rows / encoded}
        return seconds


def phases(seconds: Mapping[str, float], peaks: Mapping[str, int], steps: int, measured: float) -> str:
    """Return a table of a step's activities: their mean time, and the most memory that was allocated in them.

    Their sum is not the `measured` time if rows of these steps were encoded in others.
    """
    whole = sum(seconds.values()) or 1.0
    rows = [
        (name, f"{1e3 * spent / steps:,.2f}", f"{spent / whole:.1%}", size(peaks[name]) if name in peaks else "")
        for name, spent in seconds.items()
    ]
    rows += [(name, f"{1e3 * spent / steps:,.2f}", "", "") for name, spent in (("all", whole), ("measured", measured))]
    return table(rows, ("phase", "ms a step", "share", "peak memory"))
