"""Checkpoints in the background: when one is committed and reported, and what training waits for."""

from concurrent.futures import Future
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.datasets.ledger import Ledger
from sdp.model.checkpoints import TrainState
from sdp.storage import open_storage
from sdp.train.checkpoint import CheckpointManager, SavedCheckpoint
from sdp.train.run_folder import RunFolder
from sdp.train.world import World
from tests.waiting import until


class Manager(CheckpointManager):
    """A manager whose copies, writes and commits the test ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.copied, self.written, self.committing = Future[None](), Future[None](), Event()
        self.commits: list[int] = []

    def stage(self, _tensors: Any, state: TrainState, _consumed: Ledger, _bad: Any = ()) -> Any:
        folder = SimpleNamespace(uri=f"step-{state.step}")
        futures = {"copied": self.copied, "written": self.written, "committed": None}
        return SimpleNamespace(folder=folder, state=state, ledger_rows=3, **futures)

    def commit(self, pending: Any) -> None:
        self.commits.append(pending.state.step)
        assert self.committing.wait(60)


Made = tuple[Manager, list[SavedCheckpoint]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    reported: list[SavedCheckpoint] = []
    manager = Manager(RunFolder(open_storage(str(tmp_path))), World(), {}, on_saved=reported.append)
    manager.begin({}, TrainState(step=7, samples=3), Ledger())
    return manager, reported


def test_a_checkpoint_is_committed_when_all_have_written_and_reported_when_that_is_done(made: Made) -> None:
    manager, reported = made
    assert (manager.in_progress, manager.last_step, manager.is_written()) == (True, 7, False)
    manager.advance(all_written=False)
    assert not manager.commits
    manager.written.set_result(None)
    assert manager.is_written()
    for _ in range(2):
        manager.advance(all_written=True)
    assert not reported
    manager.committing.set()

    def is_reported() -> bool:
        manager.advance(all_written=True)
        return bool(reported)

    until(is_reported, "the report")
    assert [(saved.folder.uri, saved.state.step, saved.state.consumed, saved.ledger_rows) for saved in reported] == [
        ("step-7", 7, 3, 3)
    ]
    manager.finish()
    assert (manager.commits, len(reported), manager.in_progress, manager.is_written()) == ([7], 1, False, False)


def test_the_end_commits_what_has_not_been_committed(made: Made) -> None:
    manager, reported = made
    manager.committing.set()
    manager.written.set_result(None)
    manager.finish()
    assert (manager.commits, len(reported), manager.in_progress) == ([7], 1, False)


def test_the_next_checkpoint_ends_the_one_before(made: Made) -> None:
    manager, reported = made
    manager.committing.set()
    manager.written.set_result(None)
    manager.begin({}, TrainState(step=9), Ledger())
    assert ([saved.state.step for saved in reported], manager.last_step, manager.in_progress) == ([7], 9, True)


@pytest.mark.parametrize("future", ["copied", "written"])
def test_a_failed_copy_or_write_ends_training(made: Made, future: str) -> None:
    manager, _ = made
    getattr(manager, future).set_exception(OSError("no space left"))
    with pytest.raises(OSError, match="no space left"):
        manager.wait_for_copy() if future == "copied" else manager.is_written()
