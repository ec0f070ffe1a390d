"""Whatever is killed, each row ends with one outcome and no part is made twice."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from sdp.datasets import parts
from sdp.datasets.manifest import Dataset
from sdp.process import job
from sdp.storage import open_storage
from tests.kit import accounted
from tests.local_ray import one_node
from tests.process_kit import DEADLY, config_of, follow_instructions, make_images, picture, write_model
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    traces = tmp_path_factory.mktemp("traces")
    (traces / "wanted").write_text("1")
    with one_node(cpus=3, setup=lambda: follow_instructions(str(traces))):
        yield traces


@pytest.fixture
def traces(cluster: Path) -> Path:
    for note in cluster.iterdir():
        note.unlink()
    (cluster / "wanted").write_text("1")
    return cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def chunks_in(traces: Path) -> dict[str, int]:
    """The notes of encoded chunks, each with its encoder's process."""
    return {note.name: int(note.name.split("-")[0]) for note in traces.glob("[0-9]*-*")}


def check_whole(dataset: Dataset, rows: list[int]) -> None:
    """Every part keeps its own account, and every address has one outcome."""
    for file in dataset.storage.list("parts"):
        parts.verify_part(dataset.storage, file)
    assert Counter(accounted(dataset)) == Counter(rows)


def test_a_picture_that_kills_its_worker_is_isolated_and_recorded(tmp_path: Path, model: Path) -> None:
    def image(row: int) -> bytes:
        return picture(row) + (DEADLY if row == 23 else b"")

    # A dataset's own images are decoded in the worker; others would kill a sandbox's decoder alone.
    make_images(tmp_path, rows=60, unit_rows=20, fails=lambda _: False, image=image)
    summary = job.run(config_of(tmp_path / "images", tmp_path / "out", model, "output.rows_per_file=30"))
    assert summary.dataset is not None
    counts = summary.dataset.manifest.counts
    assert (counts.written, counts.failed, dict(counts.reasons)) == (59, 1, {"crashed": 1})
    check_whole(summary.dataset, list(range(60)))
    account = parts.read_account(summary.dataset.storage, summary.dataset.parts["path"][0].as_py()).to_pylist()
    assert (account[23]["reason"], account[23]["attempts"]) == ("crashed", 2)
    assert 2 <= summary.figures.deaths <= 6


def test_an_encoder_that_is_killed_is_replaced_and_nothing_is_lost(tmp_path: Path, model: Path, traces: Path) -> None:
    make_images(tmp_path, rows=120, unit_rows=40)
    killed: list[int] = []

    def kill() -> None:
        until(lambda: len(chunks_in(traces)) >= 3, "the third chunk")
        killed.append(next(iter(chunks_in(traces).values())))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    summary = job.run(config_of(tmp_path / "images", tmp_path / "out", model, "output.rows_per_file=40"))
    killer.join()
    assert summary.dataset is not None
    assert summary.figures.deaths >= 1
    assert len(set(chunks_in(traces).values())) == 2, "another one took over"
    assert summary.dataset.manifest.counts.written == 108
    check_whole(summary.dataset, [row for row in range(120) if row % 10 != 7])


def test_a_driver_that_is_killed_is_continued_by_the_next(tmp_path: Path, model: Path) -> None:
    make_images(tmp_path, rows=160, unit_rows=40)
    out = open_storage(str(tmp_path / "out"))
    settings = ("output.rows_per_file=20", "encode.batch_size=4")
    arguments = [f"source.uri={tmp_path / 'images'}", f"output.uri={out.uri}", f"model.source={model}"]
    arguments += ["resolutions=[64]", "encode.dtype=fp32", "encode.accelerator=cpu", *settings]
    program = f"from sdp.config import load\nfrom sdp.process import job\njob.run(load('process', None, {arguments!r}))"
    address = ray.get_runtime_context().gcs_address

    kept: dict[str, float] = {}
    for wanted in (1, 3):
        driver = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "RAY_ADDRESS": address})
        try:
            until(lambda wanted=wanted: len(out.names("parts")) >= wanted, f"part {wanted}")  # type: ignore[misc]
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        assert len(out.names("parts")) < 8, "it was killed too late to tell anything"
        for name, modified in kept.items():
            assert (tmp_path / "out" / name).stat().st_mtime == modified
        kept = {name: (tmp_path / "out" / name).stat().st_mtime for name in out.names("parts")}

    summary = job.run(config_of(tmp_path / "images", out.uri, model, *settings))
    assert summary.dataset is not None
    assert summary.figures.parts_written <= 8 - len(kept)
    for name, modified in kept.items():
        assert (tmp_path / "out" / name).stat().st_mtime == modified, "a part was made twice"
    assert summary.dataset.manifest.counts.written == 144
    check_whole(summary.dataset, [row for row in range(160) if row % 10 != 7])
