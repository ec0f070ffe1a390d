"""Jobs that are suspended at any storage operation, and go on after another job has taken over, change nothing."""

import shutil
from pathlib import Path

import pytest

from sdp.datasets.manifest import MANIFEST, Dataset, finish, open_dataset
from sdp.lease import Lease
from sdp.storage import open_storage
from tests.kit import accounted, begin_images, write_images_part, write_source
from tests.suspended import Clock, suspensions, take_over

UNIT_ROWS = 21


def complete(root: Path, lease: Lease, limit: int | None = None) -> Dataset:
    """Do what a job does once it has the lease: the index, the parts, the manifest."""
    output = begin_images(root, unit_rows=UNIT_ROWS, limit=limit)
    for work in output.pending():
        lease.check()
        write_images_part(output.storage, work)
    return finish(output, input={"uri": str(root / "source")}, check=lease.check)


@pytest.mark.parametrize("before", [0, 10])
def test_a_suspended_job_leaves_the_dataset_that_another_one_has_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    write_source(tmp_path / "source", [("a.parquet", 25), ("b.parquet", 17)])

    def fresh(number: int) -> Path:
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "source", root / "source", copy_function=shutil.copy2)
        if before:
            run(root, Clock(), limit=before)
        return root

    def run(root: Path, clock: Clock, limit: int | None = 25) -> None:
        with Lease.acquire(open_storage(str(root / "images")), clock=clock) as lease:
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
        run(root, Clock(), limit=None)
        assert open_dataset(storage).digest == dataset.digest, suspended.at
    assert f"{'replace' if before else 'create'} /images/{MANIFEST}" in at
