"""Saving and restoring a run: complete or not there.

A thread of each worker copies its share of the tensors to the host while the next step is computed, and then sends it
to the storage; training waits for the copy before it changes them. When all have sent theirs, which they tell each
other in passing (the trainer has a word for it in each step), the main worker writes the ledger and the configuration,
and last of all the marker `complete.json`, which is the commit point: whoever looks for a checkpoint looks for markers.
Ray Train is told nothing of checkpoints; its workers, started again, find the newest one themselves.
"""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from torch import Tensor

import sdp
from sdp.datasets.ledger import NAME as LEDGER
from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.device import thread_pool
from sdp.errors import UserError
from sdp.model import sharded
from sdp.model.checkpoints import COMPLETE, CONFIG, FORMAT, read_epoch_start, read_ledger, read_marker, way_out
from sdp.model.damage import DamagedCheckpoint
from sdp.model.tensor_index import read_tensor_index
from sdp.storage import Storage
from sdp.train.run_folder import RunFolder
from sdp.train.state import TrainState
from sdp.train.world import World


@dataclass
class Checkpointer:
    """Saves and restores one run. The ledger is kept whole by the main worker; others hold what they add to it."""

    run: RunFolder
    world: World
    config: Mapping[str, Any]
    keep_last: int = 3
    keep_every: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else a reader of the checkpoint wants to know: the dataset's and the model's digests."""
    keep_best: int = 0
    _ledger: Ledger = field(default_factory=Ledger)
    _losses: dict[int, float] = field(default_factory=dict)
    """Of complete checkpoints, as far as they have been looked at."""
    _left_over: set[int] | None = None
    """Steps that had a folder before this process wrote its first: looked for once, as every look is a stall."""
    _host: sharded.Host = field(default_factory=sharded.Host)
    _threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._threads = thread_pool(self.world.device, 1, "sdp-checkpoint")

    def stage(
        self, tensors: dict[str, Tensor], state: TrainState, consumed: Ledger, bad: Sequence[Outcome] = ()
    ) -> "Saving":
        """Begin to save everything; every worker calls it, with what it has consumed (or found bad) since the last
        time, and when the last checkpoint is complete."""
        folder = self.run.checkpoint(state.step)
        if self.world.is_main:
            if self._left_over is None:
                self._left_over = set(self.run.steps())
            if state.step in self._left_over:  # of a try that did not end well
                self.run.delete_checkpoint(state.step)
        self.world.share(None)  # nobody writes before that is gone
        staged = sharded.stage(folder, tensors, alone=self.world.size == 1, host=self._host)
        told = self.world.gather((consumed.to_bytes(), list(bad)))
        ledger = b""
        if self.world.is_main:
            self._ledger.merge(Ledger.from_bytes(data) for data, _ in told)
            ledger = self._ledger.to_bytes()
        outcomes = [outcome for _, some in told for outcome in some]
        rows = sum(map(self._ledger.consumed, self._ledger.epochs()))
        copied = self._threads.submit(staged.copy)
        written = self._threads.submit(_write, staged, copied)
        return Saving(folder, replace(state), ledger, rows, outcomes, staged.bytes, copied, written)

    def commit(self, saving: "Saving") -> None:
        """Make it complete; on the main worker, when all have written theirs."""
        folder, state = saving.folder, saving.state
        self.run.record_bad_rows(state.step, saving.bad)
        folder.publish(LEDGER, saving.ledger)
        folder.publish(CONFIG, json.dumps(self.config, indent=1).encode())
        stored = read_tensor_index(folder).tensors
        marker = {
            "format": FORMAT,
            "sdp": sdp.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": self.world.size,
            "tensors": len(stored),
            "bytes": sum(tensor.bytes for tensor in stored.values()),
            "state": state.to_json(),
            "epoch_start": asdict(state.start),
            **self.metadata,
        }
        folder.publish(COMPLETE, json.dumps(marker, indent=1).encode())
        self._prune(state.step)

    def commit_later(self, saving: "Saving") -> "Future[None]":
        """The same in the background."""
        return self._threads.submit(self.commit, saving)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def restore(self, tensors: dict[str, Tensor]) -> TrainState | None:
        """Load the newest complete checkpoint into tensors that are there; None where there is none."""
        step: int | None = self.world.share(self.run.latest() if self.world.is_main else None)
        if step is None:
            return None
        folder = self.run.checkpoint(step)
        try:
            marker = read_marker(folder)
            self._refuse_another_model(marker.get("model", {}))
            sharded.load(folder, tensors, alone=self.world.size == 1)
            if self.world.is_main:
                self._ledger = read_ledger(folder)
            return _state_in(marker)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(error.what, way_out(folder)) from error

    def _refuse_another_model(self, stored: Mapping[str, Any]) -> None:
        """Refuse to continue a run with another text encoder or VAE; the same one may have moved."""
        model = self.metadata.get("model", {})
        if model.get("digest") not in (None, was := stored.get("digest")) and was is not None:
            raise UserError(
                f"model.source: {model['source']} is another model than the run was begun with (it was {was[:12]}…, "
                f"now {model['digest'][:12]}…); set it back, or choose another output.uri"
            )

    def _prune(self, newest: int) -> None:
        """Delete what is old, and what never became complete."""
        steps = self.run.steps()
        complete = [step for step, whole in steps.items() if whole]
        kept = set(complete[-self.keep_last :])
        if self.keep_every:
            kept |= {step for step in complete if step % self.keep_every == 0}
        if self.keep_best:
            kept |= set(sorted(complete, key=lambda step: (self._loss(step), -step))[: self.keep_best])
        for step in steps:
            if step not in kept and step < newest:
                self.run.delete_checkpoint(step)

    def _loss(self, step: int) -> float:
        if step not in self._losses:
            try:
                loss = read_state(self.run.checkpoint(step)).loss
            except DamagedCheckpoint:  # it is not among the best, and no reason to end
                loss = None
            self._losses[step] = math.inf if loss is None else loss
        return self._losses[step]


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint on its way."""

    folder: Storage
    state: TrainState
    """As it was."""
    ledger: bytes
    """On the main worker: of all epochs and workers; and how many rows it holds."""
    ledger_rows: int
    bad: list[Outcome]
    bytes: int
    """That this worker writes."""
    copied: "Future[None]"
    """Until when no tensor may change."""
    written: "Future[None]"
    """This worker's share."""


def _write(staged: sharded.Staged, copied: "Future[None]") -> None:
    copied.result()  # done by now, in this thread; or failed
    staged.write()


def read_state(folder: Storage) -> TrainState:
    """Return the run's state at a checkpoint."""
    try:
        return _state_in(read_marker(folder))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(error.what, way_out(folder)) from error


def _state_in(marker: Mapping[str, Any]) -> TrainState:
    return TrainState.from_json(marker["state"], read_epoch_start(marker))
