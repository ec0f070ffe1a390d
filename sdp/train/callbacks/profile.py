"""Profiles a few steps: OUTPUT/profile/ has a summary, torch's trace and, of a GPU, the history of its memory."""

import gzip
import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import profile, schedule

from sdp.console import counted
from sdp.train.run_folder import PROFILE
from sdp.train.trainer import Callback, StepReport, Trainer

log = logging.getLogger(__name__)

TRACE, MEMORY = "profile/trace.json.gz", "profile/memory.pickle"
_OPERATIONS = 40
"""Operations in the summary, the longest first; a step's activities (sdp.forward, …) are among them."""


@dataclass
class Profile(Callback):
    """Runs torch's profiler on the main worker over `steps` steps, after the first `start` of this job."""

    steps: int
    start: int = 10
    _profiler: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        self._profiler = profile(
            schedule=schedule(wait=self.start - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda _: self._write(trainer),
            profile_memory=True,
        )
        self._profiler.start()
        trainer.stopwatch.named = True

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        if self._profiler is None:
            return
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
        run, cuda = trainer.checkpointer.run, trainer.world.device.type == "cuda"
        steps, trainer.stopwatch.named = self._profiler.step_num - self.start, False
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
        head = f"step {trainer.state.step}, {counted(steps, 'step')} on {trainer.world.device}"
        order = "device_time_total" if cuda else "cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=order, row_limit=_OPERATIONS, max_name_column_width=60)
        run.storage.publish(PROFILE, f"{head}\n\n{table}".encode())
        run.record("profile", step=trainer.state.step, uri=run.storage.uri_of(PROFILE))
        log.info("profiled %d steps: %s", steps, run.storage.uri_of(PROFILE))
