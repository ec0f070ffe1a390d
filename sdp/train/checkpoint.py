"""Saving and restoring a run: complete or not there.

Each worker writes its share of the tensors, the main one the ledger and the configuration, and last of all the marker
`complete.json`, which is the commit point: whoever looks for a checkpoint looks for markers. Ray Train is told nothing
of checkpoints; its workers, started again, find the newest one themselves.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from torch import Tensor

import sdp
from sdp.datasets.ledger import NAME as LEDGER
from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.model import sharded
from sdp.model.checkpoints import COMPLETE, CONFIG, FORMAT, read_marker
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
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else a reader of the checkpoint wants to know: the dataset's and the model's digests."""
    _ledger: Ledger = field(default_factory=Ledger)

    def save(self, tensors: dict[str, Tensor], state: TrainState, consumed: Ledger, bad: Sequence[Outcome] = ()) -> str:
        """Save everything; every worker calls it, with what it has consumed (or found bad) since the last time."""
        folder = self.run.checkpoint(state.step)
        if self.world.is_main:
            self.run.delete_checkpoint(state.step)  # what is left of a try that did not end well
        self.world.share(None)  # nobody writes before that is gone
        sharded.save(folder, tensors, alone=self.world.size == 1)
        told = self.world.gather((consumed.to_bytes(), list(bad)))
        if self.world.is_main:
            self._ledger.merge(Ledger.from_bytes(data) for data, _ in told)
            self.run.record_bad_rows(state.step, [outcome for _, some in told for outcome in some])
            self._commit(folder, state)
            self._prune(state.step)
        return folder.uri

    def restore(self, tensors: dict[str, Tensor]) -> TrainState | None:
        """Load the newest complete checkpoint into tensors that are there; None where there is none."""
        step: int | None = self.world.share(self.run.latest() if self.world.is_main else None)
        if step is None:
            return None
        folder = self.run.checkpoint(step)
        sharded.load(folder, tensors, alone=self.world.size == 1)
        if self.world.is_main:
            self._ledger = Ledger.from_bytes(folder.read(LEDGER), folder.uri_of(LEDGER))
        return read_state(folder)

    def _commit(self, folder: Storage, state: TrainState) -> None:
        folder.publish(LEDGER, self._ledger.to_bytes())
        folder.publish(CONFIG, json.dumps(self.config, indent=1).encode())
        stored = sharded.read_index(folder)
        marker = {
            "format": FORMAT,
            "sdp": sdp.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": self.world.size,
            "tensors": len(stored),
            "bytes": sum(tensor.bytes for tensor in stored.values()),
            "state": state.to_json(),
            **self.facts,
        }
        folder.publish(COMPLETE, json.dumps(marker, indent=1).encode())

    def _prune(self, newest: int) -> None:
        """Delete what is old, and what never became complete."""
        steps = self.run.steps()
        complete = [step for step, whole in steps.items() if whole]
        kept = set(complete[-self.keep_last :])
        if self.keep_every:
            kept |= {step for step in complete if step % self.keep_every == 0}
        for step in steps:
            if step not in kept and step < newest:
                self.run.delete_checkpoint(step)


def read_state(folder: Storage) -> TrainState:
    """Where the run stood when a checkpoint was made."""
    return TrainState.from_json(read_marker(folder)["state"])
