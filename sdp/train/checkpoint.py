"""Saving and restoring a run atomically, one checkpoint at a time, while training continues.

A thread of each worker copies its share of the tensors to the host while the next step is computed, and then writes it
to the storage; training waits for the copy before it changes the tensors. When all workers have written, which they
exchange with each step's figures, the main worker writes the ledger, the configuration and last the marker
`complete.json`. That is the commit: readers look for markers. Ray Train does not know of checkpoints; restarted workers
look for the newest one themselves.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import sdp
from sdp.config.train import CheckpointConfig
from sdp.datasets.ledger import NAME as LEDGER
from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.device import thread_pool
from sdp.errors import UserError
from sdp.model import sharded
from sdp.model.checkpoints import COMPLETE, CONFIG, FORMAT, TrainState, read_ledger, read_marker, remedy, state_in
from sdp.model.tensor_index import DamagedCheckpoint, read_tensor_index
from sdp.storage import Storage
from sdp.train.run_folder import RunFolder
from sdp.train.world import World


@dataclass(slots=True)
class SavedCheckpoint:
    """A checkpoint that is being saved, or complete; the trainer may be some steps ahead of it."""

    folder: Storage
    state: TrainState
    """The state at its step."""
    ledger: bytes
    """The ledger of all epochs and workers, on the main worker."""
    ledger_rows: int
    bad: list[Outcome]
    etags: Mapping[str, str | None]
    """Etags of files that a failed attempt has left. Only these are written over, and nothing of another job."""
    copied: "Future[None]"
    """Done when the tensors may change."""
    written: "Future[None]"
    """Done when this worker's share is in the storage."""
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    """Time for which training has stood still for it."""
    whole_s: float = 0.0
    """Time from its beginning until it was complete."""
    committed: "Future[None] | None" = None
    """Its commit, on the main worker, once all workers have written."""


@dataclass
class CheckpointManager:
    """Saves and restores one run. The main worker has the whole ledger; the others only have what they add to it.

    All workers call `begin` and `finish` at the same step. In between, each step tells all of them whether every worker
    `is_written`, and they call `advance`.
    """

    run: RunFolder
    world: World
    config: Mapping[str, Any]
    keep: CheckpointConfig = field(default_factory=CheckpointConfig)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the marker: lineage of dataset and model."""
    on_saved: Callable[[SavedCheckpoint], None] = lambda _: None
    """Called when a checkpoint is complete, or on other workers than the main one when all have written."""
    last_step: int | None = None
    """The step of the newest checkpoint, complete or not."""
    _pending: SavedCheckpoint | None = None
    _ledger: Ledger = field(default_factory=Ledger)
    _left_over: set[int] | None = None
    """Steps whose folders existed before this process wrote its first; listed once, since listing stalls training."""
    _host: sharded.HostMemory = field(default_factory=sharded.HostMemory)
    _threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._threads = thread_pool(self.world.device, 1, "sdp-checkpoint")

    @property
    def in_progress(self) -> bool:
        """True while a checkpoint is not complete."""
        return self._pending is not None

    def begin(
        self, tensors: dict[str, Tensor], state: TrainState, consumed: Ledger, bad: Sequence[Outcome] = ()
    ) -> None:
        """Begin a checkpoint, once the previous one is complete."""
        began = time.perf_counter()
        self.finish()
        self._pending, self.last_step = self.stage(tensors, state, consumed, bad), state.step
        self._pending.began, self._pending.seconds = began, time.perf_counter() - began

    def wait_for_copy(self) -> None:
        """Wait until the tensors are copied, so that they may change."""
        if self._pending is not None:
            began = time.perf_counter()
            self._pending.copied.result()
            self._pending.seconds += time.perf_counter() - began

    def is_written(self) -> bool:
        """Return whether this worker's share of the checkpoint is in the storage."""
        if self._pending is None or not self._pending.written.done():
            return False
        self._pending.written.result()
        return True

    def advance(self, *, all_written: bool) -> None:
        """Begin the commit when all workers have written; report the checkpoint when it is complete."""
        pending = self._pending
        if pending is None:
            return
        if all_written and pending.committed is None:
            if self.world.is_main:
                pending.committed = self._threads.submit(self.commit, pending)
            else:
                self._report(pending)
        elif pending.committed is not None and pending.committed.done():
            pending.committed.result()
            self._report(pending)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete, all workers together."""
        # The main worker has it until its commit, the others until all have written.
        if self.world.any_of(self.in_progress):
            if (pending := self._pending) is not None:
                pending.written.result()
            self.world.barrier()
            if pending is not None:
                if pending.committed is not None:
                    pending.committed.result()
                elif self.world.is_main:
                    self.commit(pending)
                self._report(pending)
            self.world.barrier()  # until it is complete

    def _report(self, pending: SavedCheckpoint) -> None:
        self._pending = None
        pending.whole_s = time.perf_counter() - pending.began
        self.on_saved(pending)

    def stage(
        self, tensors: dict[str, Tensor], state: TrainState, consumed: Ledger, bad: Sequence[Outcome] = ()
    ) -> SavedCheckpoint:
        """Begin to copy and write the tensors, on all workers.

        `consumed` and `bad` are this worker's rows since the previous checkpoint.
        """
        folder, etags = self.run.checkpoint(state.step), dict[str, str | None]()
        if self.world.is_main:
            if self._left_over is None:
                self._left_over = set(self.run.steps())
            if state.step in self._left_over:  # of an attempt that failed
                etags = {file.path: file.etag for file in folder.list()}
            self.run.check()
        etags = self.world.broadcast(etags)
        staged = sharded.stage(folder, tensors, alone=self.world.size == 1, host=self._host, etags=etags)
        gathered = self.world.gather((consumed.to_bytes(), list(bad)))
        ledger = b""
        if self.world.is_main:
            self._ledger.merge(Ledger.from_bytes(data) for data, _ in gathered)
            ledger = self._ledger.to_bytes()
        outcomes = [outcome for _, worker_outcomes in gathered for outcome in worker_outcomes]
        rows = sum(map(self._ledger.consumed, self._ledger.epochs()))
        copied = self._threads.submit(staged.copy)
        written = self._threads.submit(_write, staged, copied)
        return SavedCheckpoint(folder, replace(state), ledger, rows, outcomes, etags, copied, written)

    def commit(self, pending: SavedCheckpoint) -> None:
        """Complete a checkpoint, on the main worker, when all workers have written."""
        folder, state = pending.folder, pending.state
        self.run.record_bad_rows(state.step, pending.bad)
        folder.swap(LEDGER, pending.ledger, pending.etags.get(LEDGER))
        folder.swap(CONFIG, json.dumps(self.config, indent=1).encode(), pending.etags.get(CONFIG))
        stored = read_tensor_index(folder).tensors
        marker = {
            "format": FORMAT,
            "sdp": sdp.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": self.world.size,
            "gpu": torch.cuda.get_device_name(self.world.device) if self.world.device.type == "cuda" else None,
            "tensors": len(stored),
            "bytes": sum(tensor.bytes for tensor in stored.values()),
            "state": state.to_json(),
            "epoch_start": asdict(state.start),
            **self.metadata,
        }
        self.run.check()
        folder.create(COMPLETE, json.dumps(marker, indent=1).encode())
        self._prune(state.step)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def restore(self, tensors: dict[str, Tensor]) -> TrainState | None:
        """Load the newest complete checkpoint into the tensors and return its state; None if there is none."""
        step = self.world.broadcast(self.run.latest() if self.world.is_main else None)
        if step is None:
            return None
        folder = self.run.checkpoint(step)
        try:
            marker = read_marker(folder)
            self._refuse_another_model(marker.get("model", {}))
            sharded.load(folder, tensors)
            if self.world.is_main:
                self._ledger = read_ledger(folder)
            self.last_step = step
            return state_in(marker)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(error.what, remedy(folder)) from error

    def _refuse_another_model(self, stored: Mapping[str, Any]) -> None:
        """Refuse to continue a run with another text encoder or VAE; a copy at another URI is accepted."""
        model = self.metadata.get("model", {})
        if model.get("digest") not in (None, was := stored.get("digest")) and was is not None:
            raise UserError(
                f"model.source: {model['source']} is another model than the run began with (it was {was[:12]}…, now "
                f"{model['digest'][:12]}…); set it back, or choose another output.uri"
            )

    def _prune(self, newest: int) -> None:
        """Delete old checkpoints, and those that were never completed."""
        steps = self.run.steps()
        kept = steps.complete[-self.keep.keep_last :]
        for step in steps:
            if step not in kept and step < newest:
                self.run.delete_checkpoint(step)


def _write(staged: sharded.Staged, copied: "Future[None]") -> None:
    copied.result()  # done, since this thread ran it before; raises if it failed
    staged.write()
