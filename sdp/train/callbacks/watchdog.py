"""Ends a worker that has stood still for too long, after it has told where it stands."""

import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from sdp.errors import SdpError
from sdp.storage import Storage
from sdp.train.callbacks.base import Callback, Saved, StepReport

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer

log = logging.getLogger(__name__)

EXIT_CODE = 70
_RECORD_S = 20.0


def leave() -> None:
    """End this process at once: a thread that hangs in a collective or a read can be ended in no other way."""
    os._exit(EXIT_CODE)


@dataclass
class Watchdog(Callback):
    """After `seconds` without a step the stacks of all threads go to the run's stacks/, and the process ends.

    Every worker has one. When a collective hangs, all of them hang: each tells its own side of it, also by torch's
    record of the collectives that it took part in.
    """

    seconds: float
    end: Callable[[], None] = leave
    _beat: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def on_start(self, trainer: "Trainer") -> None:
        self._beat = time.monotonic()
        where = trainer.checkpointer.run.storage, trainer.world.rank
        self._thread = threading.Thread(target=self._watch, args=where, name="sdp-watchdog", daemon=True)
        self._thread.start()

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:  # noqa: ARG002 (only that there is one counts)
        self._beat = time.monotonic()

    def on_checkpoint(self, trainer: "Trainer", saved: Saved) -> None:  # noqa: ARG002 (as above)
        self._beat = time.monotonic()

    def close(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _watch(self, run: Storage, rank: int) -> None:
        while not self._done.wait(self._left()):
            if self._left() > 0:
                continue
            log.error("worker %d: no step for %.0f s; its stacks go to %s", rank, self.seconds, run.uri_of("stacks"))
            moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            try:
                run.publish(f"stacks/{moment}-worker-{rank:05d}.txt", stacks())
                record = within(_RECORD_S, flight_record)
                if record:
                    run.publish(f"stacks/{moment}-worker-{rank:05d}-collectives.json", record)
            except SdpError as error:
                log.error("the stacks could not be kept: %s\n%s", error, stacks().decode())
            self.end()
            return

    def _left(self) -> float:
        return max(0.0, self._beat + self.seconds - time.monotonic())


def flight_record() -> bytes | None:
    """The last collectives of this worker, by torch's flight recorder: which have begun, which have ended."""
    from torch import distributed

    if not distributed.is_initialized():
        return None
    from torch._C import _distributed_c10d as recorders

    torchs: Any = recorders
    kept = [json.loads(dump()) for dump in (torchs._dump_nccl_trace_json, torchs._dump_fr_trace_json)]
    return json.dumps(next((record for record in kept if record.get("entries")), kept[0]), indent=1).encode()


def within(seconds: float, ask: Callable[[], bytes | None]) -> bytes | None:
    """What is answered in time: a driver that hangs may not answer at all."""
    answer: list[bytes | None] = []

    def asking() -> None:
        try:
            answer.append(ask())
        except Exception as error:  # noqa: BLE001 (the process is ending; it is told)
            log.error("no record of collectives: %s", error)

    thread = threading.Thread(target=asking, name="sdp-flight-record", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def stacks() -> bytes:
    """Where every thread of this process is."""
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
