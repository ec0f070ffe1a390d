"""The background saver: when a checkpoint is committed and reported, and what training waits for."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.datasets.ledger import Ledger
from sdp.model.checkpoints import TrainState
from sdp.train.callbacks.base import Saved
from sdp.train.saver import Saver
from sdp.train.world import World


class FakeCheckpointer:
    """A checkpointer whose copies, writes and commits the test ends."""

    def __init__(self) -> None:
        self.copied, self.written, self.committing = Future[None](), Future[None](), Future[None]()
        self.commits: list[str] = []

    def stage(self, _tensors: Any, state: TrainState, _consumed: Ledger, _bad: Any) -> Any:
        folder = SimpleNamespace(uri=f"step-{state.step}")
        return SimpleNamespace(folder=folder, state=state, ledger_rows=3, copied=self.copied, written=self.written)

    def commit(self, _saving: Any) -> None:
        self.commits.append("now")

    def commit_later(self, _saving: Any) -> "Future[None]":
        self.commits.append("later")
        return self.committing


@pytest.fixture
def made() -> tuple[Saver, FakeCheckpointer, list[Saved]]:
    reported: list[Saved] = []
    checkpointer: Any = FakeCheckpointer()
    saver = Saver(checkpointer, World(), reported.append)
    saver.begin({}, TrainState(step=7, samples=3), Ledger())
    return saver, checkpointer, reported


Made = tuple[Saver, FakeCheckpointer, list[Saved]]


def test_a_checkpoint_is_committed_when_all_have_written_and_reported_when_that_is_done(made: Made) -> None:
    saver, checkpointer, reported = made
    assert (saver.in_progress, saver.last_step, saver.is_written()) == (True, 7, False)
    saver.advance(all_written=False)
    assert not checkpointer.commits
    checkpointer.written.set_result(None)
    assert saver.is_written()
    for _ in range(2):
        saver.advance(all_written=True)
    assert (checkpointer.commits, reported) == (["later"], [])
    checkpointer.committing.set_result(None)
    saver.advance(all_written=True)
    assert [(saved.uri, saved.step, saved.samples, saved.ledger_rows) for saved in reported] == [("step-7", 7, 3, 3)]
    saver.advance(all_written=True)
    saver.finish()
    assert (len(reported), saver.in_progress, saver.is_written()) == (1, False, False)


def test_the_end_commits_what_has_not_been_committed(made: Made) -> None:
    saver, checkpointer, reported = made
    checkpointer.written.set_result(None)
    saver.finish()
    assert (checkpointer.commits, len(reported), saver.in_progress) == (["now"], 1, False)


def test_the_next_checkpoint_ends_the_one_before(made: Made) -> None:
    saver, checkpointer, reported = made
    checkpointer.written.set_result(None)
    saver.begin({}, TrainState(step=9), Ledger())
    assert ([saved.step for saved in reported], saver.last_step, saver.in_progress) == ([7], 9, True)


@pytest.mark.parametrize("future", ["copied", "written"])
def test_a_failed_copy_or_write_ends_training(made: Made, future: str) -> None:
    saver, checkpointer, _ = made
    getattr(checkpointer, future).set_exception(OSError("no space left"))
    with pytest.raises(OSError, match="no space left"):
        saver.wait_for_copy() if future == "copied" else saver.is_written()
