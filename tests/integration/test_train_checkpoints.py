"""Checkpoints written during training."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.datasets.ledger import Ledger
from sdp.errors import StorageError
from sdp.model import sharded
from sdp.model.checkpoints import read_state
from sdp.model.tensor_index import DamagedCheckpoint, read_tensor_index
from sdp.storage import Storage, local, open_storage
from sdp.storage.local import LocalStorage
from sdp.train import job
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.metrics import RecordMetrics
from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.run_folder import RunFolder
from sdp.train.step import weighted_losses
from sdp.train.trainer import Callback, StepReport, Trainer
from tests.training import Watch, config, train


class At(Callback):
    """Sets an event at a step, and records what was saved."""

    def __init__(self, step: int, what: threading.Event) -> None:
        self.step, self.what = step, what
        self.saved: list[tuple[int, int]] = []
        """Steps of checkpoints, and the step at which each was complete."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        if report.step == self.step:
            self.what.set()

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:
        self.saved.append((saved.state.step, trainer.state.step))


def assert_equal(one: Storage, other: Storage) -> None:
    names = list(read_tensor_index(one).tensors)
    tensors, others = (sharded.read_tensors(folder, names) for folder in (one, other))
    assert all(torch.equal(tensors[name], others[name]) for name in names)


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

    folder = RunFolder(open_storage(str(root / "went_on")))
    assert read_state(folder.checkpoint(3)).to_json() | {"seconds": 0, "trainer_hours": 0} == read_state(
        expected.checkpoint(3)
    ).to_json() | {"seconds": 0, "trainer_hours": 0}
    for run in (expected, folder):
        ledger = Ledger.from_bytes(run.checkpoint(3).read("ledger.roaring"))
        assert ledger.consumed(0) == 24
    assert_equal(expected.checkpoint(3), folder.checkpoint(3))


def test_a_step_is_computed_while_the_last_one_is_copied_and_taken_when_that_is_done(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(root, "stopped", max_steps=3))
    expected = RunFolder(open_storage(str(root / "stopped"))).checkpoint(3)

    computed, taken = threading.Event(), threading.Event()
    copy = sharded.Staged.copy
    early: list[bool] = []

    def copy_late(staged: sharded.Staged) -> None:
        assert computed.wait(timeout=60)
        early.append(taken.wait(timeout=0.5))  # a step that does not wait would be taken by now
        copy(staged)

    def compute(*arguments: Any) -> Any:
        losses = weighted_losses(*arguments)
        if len(watch.reports) == 3:
            computed.set()
        return losses

    watch = Watch()
    monkeypatch.setattr(sharded.Staged, "copy", copy_late)
    monkeypatch.setattr("sdp.train.trainer.weighted_losses", compute)
    train(config(root, "went_on", max_steps=5), callbacks=[watch, At(4, taken), SaveCheckpoints(3)])
    assert early == [False, True]  # the last checkpoint is of step 5, after all
    assert_equal(expected, RunFolder(open_storage(str(root / "went_on"))).checkpoint(3))


@pytest.mark.parametrize(
    ("name", "gone"), [("worker-00000.000.bin", False), ("tensors.json", True), ("ledger.roaring", False)]
)
def test_a_damaged_newest_checkpoint_says_how_to_go_on_and_it_is_so(root: Path, name: str, gone: bool) -> None:
    train(config(root, max_steps=4), callbacks=[SaveCheckpoints(2)])
    folder = root / "run/checkpoints/step-000000004"
    data = bytearray((folder / name).read_bytes())
    (folder / name).unlink()
    if not gone:
        data[len(data) // 2 : len(data) // 2 + 64] = b"\x01" * 64  # which no string of JSON may hold
        (folder / name).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=f"{folder}/{name}: .*; delete {folder} to go on from step 2") as caught:
        train(config(root, max_steps=6))
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    train(config(root, max_steps=6), callbacks=[watch := Watch()])
    assert [report.step for report in watch.reports] == [3, 4, 5, 6]


def test_metrics_that_came_before_a_checkpoint_are_there_with_it(root: Path) -> None:
    class Dies(Callback):
        def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:  # noqa: ARG002
            raise ValueError("dies")

    with pytest.raises(ValueError, match="dies"):  # before RecordMetrics hears of the checkpoint
        train(config(root, max_steps=9), callbacks=[SaveCheckpoints(3), Dies(), RecordMetrics(1)])
    assert [line["step"] for line in RunFolder(open_storage(str(root / "run"))).metrics()][:3] == [1, 2, 3]


@pytest.mark.parametrize("file", ["complete.json", ".bin"])
def test_a_full_disk_at_a_checkpoint_is_a_line_and_the_next_run_continues(
    root: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    real, training = LocalStorage._draft_file, config(root, checkpoint__every_steps=2)

    @contextmanager
    def draft_file(self: LocalStorage, path: str, data: Any) -> Iterator[Any]:
        if "step-000000004" in f"{self.uri}/{path}" and path.endswith(file):
            with local._explained(self.uri_of(path)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with real(self, path, data) as files:
            yield files

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "_draft_file", draft_file)
        with pytest.raises(StorageError, match=r"step-000000004.*: no space left on the device; free some") as caught:
            job.run(training)
    assert "\n" not in str(caught.value)
    assert job.run(training).state.step == 6
    events = RunFolder(open_storage(str(root / "run"))).events()
    assert [event["from_step"] for event in events if event["event"] == "start"] == [0, 2]
