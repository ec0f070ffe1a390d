"""Ends a worker that has made no progress for too long, after saving its stacks."""

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import Any

from sdp.errors import SdpError
from sdp.storage import Storage
from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.trainer import Callback, StepReport, Trainer

log = logging.getLogger(__name__)

WATCHDOG_S = 1800.0
"""The longest time without a first step: a first read of slow storage takes less, and so does compiling one graph."""
EXIT_CODE = 70
_SAVE_S = 60.0
"""Deadline for saving the stacks, should the storage be what hangs."""
_RECORD_S = 20.0
_LOOK_S = 1.0
"""Time between looks, since the limit changes with the first step."""


@dataclass
class Watchdog(Callback):
    """Saves the stacks of all threads to the run's stacks/ when steps stay away for too long, and ends the process.

    Every worker has one. When a collective hangs, all workers hang, and each saves its own side of it, with torch's
    record of its last collectives.
    """

    seconds: float
    """The longest time without a step, or a graph compiled, until the first step is done."""
    then: float | None = None
    """The same after the first step; None means that it stays."""
    _beat: float = 0.0
    _compiler: tuple[list[Any], ...] = ()
    """The functions that torch's compiler calls when it begins a graph, and when it has one."""
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._note()
        if "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            self._compiler = callback_handler.start_callbacks, callback_handler.end_callbacks
        for called in self._compiler:
            called.append(self._note)
        where = trainer.checkpointer.run.storage.with_options(timeout_s=_SAVE_S), trainer.world.rank
        self._thread = threading.Thread(target=self._watch, args=where, name="sdp-watchdog", daemon=True)
        self._thread.start()

    def on_compile(self, trainer: Trainer, progress: str) -> None:  # noqa: ARG002
        self._note()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        self._note()
        self.seconds = self.then or self.seconds

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:  # noqa: ARG002
        self._note()

    def close(self) -> None:
        self._done.set()
        for called in self._compiler:
            with suppress(ValueError):  # torch has forgotten its callers
                called.remove(self._note)
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _note(self, *_: Any) -> None:
        """Note that something has gone on."""
        self._beat = time.monotonic()

    def _watch(self, run: Storage, rank: int) -> None:
        while not self._done.wait(min(self._left(), _LOOK_S)):
            if self._left() > 0:
                continue
            log.error("worker %d: no step for %.0f s; saving stacks to %s", rank, self.seconds, run.uri_of("stacks"))
            moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            try:
                run.publish(f"stacks/{moment}-worker-{rank:05d}.txt", stacks())
                # A hanging CUDA driver may never return, so a thread waits for it.
                name = f"stacks/{moment}-worker-{rank:05d}-collectives.json"
                save = threading.Thread(target=save_flight_record, args=(run, name), name="sdp-flight", daemon=True)
                save.start()
                save.join(_RECORD_S)
            except SdpError as error:
                log.error("could not save the stacks: %s\n%s", error, stacks().decode())
            os._exit(EXIT_CODE)  # nothing else ends a thread that hangs in a collective or a read

    def _left(self) -> float:
        return max(0.0, self._beat + self.seconds - time.monotonic())


def save_flight_record(run: Storage, name: str) -> None:
    """Write torch's flight record of this worker's last collectives, if there is one."""
    from torch import distributed

    if distributed.is_initialized():
        from torch._C import _distributed_c10d as recorders

        module: Any = recorders
        records = [json.loads(dump()) for dump in (module._dump_nccl_trace_json, module._dump_fr_trace_json)]
        record = next((record for record in records if record.get("entries")), records[0])
        run.publish(name, json.dumps(record, indent=1).encode())


def stacks() -> bytes:
    """Return the stacks of all threads of this process."""
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
