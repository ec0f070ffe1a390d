"""Jobs that are suspended at any storage operation, and go on after another job has taken over, change nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.config.train import CheckpointConfig
from sdp.datasets import tombstones
from sdp.datasets.blanking import blank
from sdp.datasets.ledger import Ledger
from sdp.datasets.manifest import MANIFEST, Dataset, finish, open_dataset
from sdp.datasets.parts import iter_rows
from sdp.datasets.tombstones import Takedown
from sdp.errors import AlreadyExists
from sdp.lease import Lease
from sdp.model.checkpoints import TrainState
from sdp.model.sharded import read_tensors
from sdp.storage import open_storage
from sdp.train.checkpoint import CheckpointManager
from sdp.train.metrics_log import MetricsLog
from sdp.train.run_folder import RunFolder
from sdp.train.world import World
from tests.kit import accounted, begin_images, make_images, write_images_part, write_source
from tests.suspended import suspensions, take_over

UNIT_ROWS = 21


def complete(root: Path, lease: Lease, limit: int | None = None) -> Dataset:
    """Do what a job does once it has the lease: the index, the parts, the manifest."""
    output = begin_images(root, unit_rows=UNIT_ROWS, limit=limit)
    for work in output.pending():
        lease.check()
        write_images_part(output.storage, work)
    return finish(output, input={"uri": str(root / "source")}, check=lease.confirm)


@pytest.mark.parametrize("before", [0, 10])
def test_a_suspended_job_leaves_the_dataset_that_another_one_has_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    write_source(tmp_path / "source", [("a.parquet", 25), ("b.parquet", 17)])

    def fresh(number: int) -> Path:
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "source", root / "source", copy_function=shutil.copy2)
        if before:
            run(root, limit=before)
        return root

    def run(root: Path, limit: int | None = 25) -> None:
        with Lease.acquire(open_storage(str(root / "images"))) as lease:
            complete(root, lease, limit)

    at = []
    for root, suspended in suspensions(monkeypatch, fresh, run):
        storage = open_storage(str(root / "images"))
        with take_over(storage) as lease:
            dataset = complete(root, lease)
        suspended.go_on()
        at.append(suspended.at)
        assert open_dataset(storage).digest == dataset.digest, suspended.at
        assert sorted(accounted(dataset)) == list(range(42)), suspended.at
        run(root, limit=None)
        assert open_dataset(storage).digest == dataset.digest, suspended.at
    assert f"{'replace' if before else 'create'} /images/{MANIFEST}" in at


def test_a_suspended_audit_leaves_the_parts_that_another_one_has_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(number: int) -> Path:
        root = tmp_path / str(number)
        begin_images(root, files=[("a.parquet", 5)])
        tombstones.add(make_images(root).storage, [Takedown("row", "1")])
        return root

    def rewrite(root: Path) -> None:
        storage = open_storage(str(root / "images"))
        with Lease.acquire(storage) as lease:
            blank(storage, lease.confirm)

    for root, suspended in suspensions(monkeypatch, fresh, rewrite):
        storage = open_storage(str(root / "images"))
        tombstones.add(storage, [Takedown("row", "2")])
        with take_over(storage) as lease:
            blank(storage, lease.confirm)
        suspended.go_on()
        (rows,) = iter_rows(storage, "parts/000000000.parquet", ["image"], 9)
        assert [set(image) == {0} for image in rows["image"].to_pylist()] == [False, True, True, False], suspended.at


def save(root: Path, lease: Lease, last: int, written: float, before_last: Callable[[], None] = lambda: None) -> None:
    """Do what a run does with its folder: continue from the newest checkpoint, and save one at each step.

    `before_last` is called when the last one lacks its marker alone.
    """
    run = RunFolder(open_storage(str(root / "run")), lease.confirm)
    run.claim({"datasets": [], "identity": {}})
    run.record("start", by=written)
    saver = CheckpointManager(run, World(), {}, CheckpointConfig(keep_last=1))
    tensors = {"model.a": torch.zeros(3), "model.b": torch.zeros(2, 2)}
    state = saver.restore(tensors) or TrainState(0)
    metrics = MetricsLog(run.storage, state.step, run.check)
    for step in range(state.step + 1, last + 1):
        figures = ("samples", "epoch", "workers", "epoch_done", "samples_per_s", "seconds")
        metrics.add({**dict.fromkeys(figures, int(written)), "step": step})
        metrics.finish()
        for tensor in tensors.values():
            tensor.fill_(written + step)
        saving = saver.stage(tensors, TrainState(step), Ledger())
        saving.written.result()
        if step == last:
            before_last()
        saver.commit(saving)
    saver.close()
    metrics.close()


def trainer(last: int, written: float) -> Callable[[Path], None]:
    """Return a job that acquires a run's lease and saves its checkpoints."""

    def run(root: Path) -> None:
        with Lease.acquire(open_storage(str(root / "run"))) as lease:
            save(root, lease, last, written)

    return run


def state_of(run: RunFolder, step: int) -> tuple[dict[str, str | None], list[dict[str, Any]]]:
    """Return the etags of a checkpoint's files, and the metrics of the second job."""
    etags = {file.path: file.etag for file in run.checkpoint(step).list()}
    return etags, [line for line in run.metrics() if line["samples"] == 200]


@pytest.mark.slow
def test_a_suspended_trainer_does_not_complete_the_checkpoint_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(number: int) -> Path:
        root = tmp_path / str(number)
        root.mkdir()
        return root

    ended = []
    for root, suspended in suspensions(monkeypatch, fresh, trainer(1, 100.0)):
        with take_over(open_storage(str(root / "run"))) as lease:
            try:
                save(root, lease, 1, 200.0, suspended.go_on)
            except AlreadyExists:  # of the first job's one file that was on its way; to be run again
                ended.append(suspended.at)
        suspended.go_on()
    files = ("ledger.roaring", "config.json", "complete.json")
    assert ended == [f"create /run/checkpoints/step-000000001/{name}" for name in files]


@pytest.mark.parametrize(("left_over", "last"), [(False, 2), (False, 3), (True, 2)])
def test_a_suspended_trainer_leaves_the_checkpoints_that_another_job_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, *, left_over: bool
) -> None:
    def fresh(number: int) -> Path:
        root = tmp_path / str(number)
        root.mkdir()
        if left_over:  # a job was killed before it completed its second checkpoint
            trainer(2, 50.0)(root)
            (root / "run/checkpoints/step-000000002/complete.json").unlink()
        return root

    at = []
    for root, suspended in suspensions(monkeypatch, fresh, trainer(2, 100.0)):
        folder = RunFolder(open_storage(str(root / "run")))
        with take_over(folder.storage) as lease:
            save(root, lease, last, 200.0)
        before = state_of(folder, last)
        suspended.go_on()
        at.append(suspended.at)
        assert folder.latest() == last, suspended.at
        assert state_of(folder, last) == before, suspended.at
        values = {
            value
            for tensor in read_tensors(folder.checkpoint(last), ["model.a", "model.b"]).values()
            for value in tensor.flatten().tolist()
        }
        assert values in ({100.0 + last}, {200.0 + last}), suspended.at
        assert 200.0 in [event["by"] for event in folder.events()], suspended.at
    assert "create /run/checkpoints/step-000000002/complete.json" in at
