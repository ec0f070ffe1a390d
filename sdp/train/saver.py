"""Checkpoints in the background: one at a time, copied and written while training continues."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.model.checkpoints import TrainState
from sdp.train.callbacks.base import Saved
from sdp.train.checkpoint import Checkpointer, Saving
from sdp.train.world import World


class Saver:
    """Takes a checkpoint from its beginning to its commit without stopping training.

    All workers call `begin` and `finish` at the same step. In between, each step tells all of them whether every worker
    `is_written`, and they call `advance`.
    """

    def __init__(self, checkpointer: Checkpointer, world: World, on_saved: Callable[[Saved], None]) -> None:
        """`on_saved` is called when a checkpoint is complete, or on other workers when all have written."""
        self._checkpointer, self._world, self._on_saved = checkpointer, world, on_saved
        self._pending: Saving | None = None
        """A checkpoint that is not complete yet."""
        self._committed: Future[None] | None = None
        """Its commit, on the main worker, once all workers have written."""
        self._began = self._stalled_s = 0.0
        """The moment it began, and the time for which training has stood still for it."""
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
        self._pending = self._checkpointer.stage(tensors, state, consumed, bad)
        self.last_step, self._committed = state.step, None
        self._began, self._stalled_s = began, time.perf_counter() - began

    def wait_for_copy(self) -> None:
        """Wait until the tensors are copied, so that they may change."""
        if self._pending is not None:
            began = time.perf_counter()
            self._pending.copied.result()
            self._stalled_s += time.perf_counter() - began

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
        if all_written and self._committed is None:
            if self._world.is_main:
                self._committed = self._checkpointer.commit_later(pending)
            else:
                self._report(pending)
        elif self._committed is not None and self._committed.done():
            self._committed.result()
            self._report(pending)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete, all workers together."""
        # The main worker has it until its commit, the others until all have written.
        if self._world.any_of(self.in_progress):
            if (pending := self._pending) is not None:
                pending.written.result()
            self._world.barrier()
            if pending is not None:
                if self._committed is not None:
                    self._committed.result()
                elif self._world.is_main:
                    self._checkpointer.commit(pending)
                self._report(pending)
            self._world.barrier()  # until it is complete

    def _report(self, saving: Saving) -> None:
        self._pending = None
        self._on_saved(
            Saved(
                saving.folder.uri,
                saving.state.step,
                self._stalled_s,
                time.perf_counter() - self._began,
                saving.state.consumed,
                saving.ledger_rows,
            )
        )
