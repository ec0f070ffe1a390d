"""Checkpoints in the background: one at a time, copied and written while training continues."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.model.checkpoints import TrainState
from sdp.train.callbacks.base import Saved
from sdp.train.checkpoint import Checkpointer, Saving
from sdp.train.world import World


@dataclass
class _Pending:
    """A checkpoint that is not complete yet."""

    saving: Saving
    began: float
    stalled_s: float
    """Time for which training has stood still for it."""
    committed: Future[None] | None = None
    """The commit, on the main worker, once all workers have written."""


class Saver:
    """Takes a checkpoint from its beginning to its commit without stopping training.

    All workers call `begin` and `finish` at the same step. In between, each step tells all of them whether every worker
    `is_written`, and they call `advance`.
    """

    def __init__(self, checkpointer: Checkpointer, world: World, on_saved: Callable[[Saved], None]) -> None:
        """`on_saved` is called when a checkpoint is complete, or on other workers when all have written."""
        self._checkpointer, self._world, self._on_saved = checkpointer, world, on_saved
        self._pending: _Pending | None = None
        self.last_step: int | None = None
        """The step of the newest checkpoint, complete or not."""

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
        saving = self._checkpointer.stage(tensors, state, consumed, bad)
        self.last_step = state.step
        self._pending = _Pending(saving, began, time.perf_counter() - began)

    def wait_for_copy(self) -> None:
        """Wait until the tensors are copied, so that they may change."""
        if self._pending is not None:
            began = time.perf_counter()
            self._pending.saving.copied.result()
            self._pending.stalled_s += time.perf_counter() - began

    def is_written(self) -> bool:
        """Return whether this worker's share of the checkpoint is in the storage."""
        if self._pending is None or not self._pending.saving.written.done():
            return False
        self._pending.saving.written.result()
        return True

    def advance(self, *, all_written: bool) -> None:
        """Begin the commit when all workers have written; report the checkpoint when it is complete."""
        pending = self._pending
        if pending is None:
            return
        if all_written and pending.committed is None:
            if self._world.is_main:
                pending.committed = self._checkpointer.commit_later(pending.saving)
            else:
                self._report(pending)
        elif pending.committed is not None and pending.committed.done():
            pending.committed.result()
            self._report(pending)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete, all workers together."""
        # The main worker has it until its commit, the others until all have written.
        if self._world.any_of([self._pending is not None])[0]:
            if (pending := self._pending) is not None:
                pending.saving.written.result()
            self._world.barrier()
            if pending is not None:
                if pending.committed is not None:
                    pending.committed.result()
                elif self._world.is_main:
                    self._checkpointer.commit(pending.saving)
                self._report(pending)
            self._world.barrier()  # until it is complete

    def _report(self, pending: _Pending) -> None:
        self._pending = None
        saving = pending.saving
        self._on_saved(
            Saved(
                saving.folder.uri,
                saving.state.step,
                pending.stalled_s,
                time.perf_counter() - pending.began,
                saving.state.consumed,
                saving.ledger_rows,
            )
        )
