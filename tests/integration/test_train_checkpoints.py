"""Checkpoints that are written while training goes on."""

import threading
from pathlib import Path

import pytest
import torch

from sdp.datasets.ledger import Ledger
from sdp.errors import StorageError
from sdp.model import sharded
from sdp.storage import open_storage
from sdp.train.callbacks.base import Callback, Saved, StepReport
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.checkpoint import read_state
from sdp.train.run_folder import RunFolder
from sdp.train.trainer import Trainer
from tests.latents import make_latents
from tests.tiny_model import make_tiny_model
from tests.training import config, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")
    make_tiny_model(root / "model")
    make_latents(root, 60, unit_rows=20, group_rows=5, vocabulary=50)
    return root


@pytest.fixture
def root(inputs: Path, tmp_path: Path) -> Path:
    for name in ("model", "latents"):
        (tmp_path / name).symlink_to(inputs / name)
    return tmp_path


class At(Callback):
    """Sets an event at a step; keeps what was saved."""

    def __init__(self, step: int, what: threading.Event) -> None:
        self.step, self.what = step, what
        self.saved: list[tuple[int, int]] = []
        """Steps of checkpoints, and at which step they were complete."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        if report.step == self.step:
            self.what.set()

    def on_checkpoint(self, trainer: Trainer, saved: Saved) -> None:
        self.saved.append((saved.step, trainer.state.step))


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_when_it_was_begun(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(root, "stopped", max_steps=3))
    expected = RunFolder(open_storage(str(root / "stopped")))

    written, slow = threading.Event(), sharded.Staged.write

    def wait_and_write(staged: sharded.Staged) -> None:
        assert written.wait(timeout=60)
        slow(staged)

    monkeypatch.setattr(sharded.Staged, "write", wait_and_write)
    at = At(6, written)
    trainer = train(config(root, "went_on", max_steps=9), callbacks=[at, SaveCheckpoints(3)])
    first, *others = at.saved
    assert first[0] == 3
    assert first[1] >= 6  # three steps were taken while it could not be written
    assert [step for step, _ in others] == [6, 9]
    assert trainer.state.step == 9

    found = RunFolder(open_storage(str(root / "went_on")))
    assert read_state(found.checkpoint(3)).to_json() | {"seconds": 0} == read_state(
        expected.checkpoint(3)
    ).to_json() | {"seconds": 0}
    for run in (expected, found):
        ledger = Ledger.from_bytes(run.checkpoint(3).read("ledger.roaring"))
        assert ledger.consumed(0) == 24
    names = list(sharded.read_index(expected.checkpoint(3)))
    one, other = (sharded.read_tensors(run.checkpoint(3), names) for run in (expected, found))
    assert all(torch.equal(one[name], other[name]) for name in names)
    assert any(name.startswith("optimizer") or "exp_avg" in name for name in names)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(staged: sharded.Staged) -> None:  # noqa: ARG001
        raise StorageError("s3://bucket/run: no space left")

    monkeypatch.setattr(sharded.Staged, "write", fail)
    with pytest.raises(StorageError, match="no space left"):
        train(config(root, max_steps=9), callbacks=[SaveCheckpoints(3)])
    assert RunFolder(open_storage(str(root / "run"))).latest() is None


def test_one_that_was_being_written_when_the_worker_died_is_not_there_and_is_cleared_away(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = threading.Event()

    def never(*given: object) -> None:  # noqa: ARG001
        assert committed.wait(timeout=60)
        raise RuntimeError("the process is gone by now")

    class Dies(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
            if report.step == 5:
                committed.set()
                raise ValueError("dies")

    how = config(root, max_steps=6)
    with monkeypatch.context() as patch:
        patch.setattr("sdp.train.checkpoint.Checkpointer.commit", never)
        with pytest.raises(ValueError, match="dies"):
            train(how, callbacks=[Dies(), SaveCheckpoints(3)])
    folder = RunFolder(open_storage(str(root / "run")))
    assert folder.steps() == {3: False}
    trainer = train(how, callbacks=[SaveCheckpoints(3)])
    assert not trainer.resumed
    assert folder.steps() == {3: True, 6: True}


def test_the_best_are_kept_beside_the_newest(root: Path) -> None:
    losses = {1: 0.9, 2: 0.2, 3: 0.5, 4: 0.3, 5: 0.8, 6: 0.7}

    class Pretend(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:
            trainer.state.loss = losses[report.step]

    how = config(root, max_steps=6, checkpoint__keep_last=1, checkpoint__keep_best=2)
    train(how, callbacks=[Pretend(), SaveCheckpoints(1)])
    assert RunFolder(open_storage(str(root / "run"))).steps() == {2: True, 4: True, 6: True}
