"""`data.reader: ray` on a local Ray: Ray Data reads, trainers take equal shares, and nothing is lost or doubled."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from sdp.config import TrainConfig
from sdp.datasets.ledger import Ledger
from sdp.errors import DatasetError, UserError
from sdp.storage import open_storage
from sdp.train.driver import TrainSummary
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from tests.latents import make_latents
from tests.tiny_model import make_tiny_model
from tests.training import config

_DEADLINE_S = 240
ROWS = 120


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("ray-reader")
    make_tiny_model(root / "model")
    make_latents(root, ROWS, unit_rows=30, group_rows=5, vocabulary=50, failed=10)
    return root


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def how(root: Path, **changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "data__reader": "ray", "data__segment_rows": 60, "data__batch_size": 4, "max_steps": None, "max_epochs": 1,
        "log__every_steps": 1, "data__readers": 1,
    }  # fmt: skip
    return config(root, **{**usual, **changes})


WRITTEN = [row for row in range(ROWS) if row % 10]


def trained_on(summary: TrainSummary, epoch: int) -> list[int]:
    assert summary.checkpoint is not None
    return list(Ledger.from_bytes(open_storage(summary.checkpoint).read("ledger.roaring")).rows(epoch))


def when(folder: RunFolder, event: str, then: Any) -> threading.Thread:
    """Do something with an event of the run as soon as there is one."""

    def watch() -> None:
        deadline, pause = time.monotonic() + _DEADLINE_S, threading.Event()
        while time.monotonic() < deadline:
            for found in folder.events():
                if found["event"] == event:
                    then(found)
                    return
            pause.wait(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_costs_a_restart_and_no_row(root: Path) -> None:
    told = how(root, scaling__num_workers=2, checkpoint__every_steps=2, max_epochs=2)
    folder = RunFolder(open_storage(told.output.uri))
    pids: list[int] = []
    when(folder, "training", lambda event: pids.extend(int(w.rpartition(" ")[2]) for w in event["workers"]))
    killer = when(folder, "checkpoint", lambda _: os.kill(pids[1], signal.SIGKILL))
    summary = run(told)
    killer.join(timeout=1)
    assert summary.recoveries == 1
    assert [trained_on(summary, epoch) for epoch in range(2)] == [WRITTEN, WRITTEN]
    assert summary.state.samples == 2 * len(WRITTEN)
    assert summary.state.step == 2 * -(-len(WRITTEN) // 8)


@pytest.mark.usefixtures("cluster")
def test_another_number_of_workers_goes_on_with_the_rows_that_are_left(root: Path) -> None:
    stopped = run(how(root, max_epochs=None, max_steps=4, scaling__num_workers=3))
    assert (stopped.state.epoch, stopped.state.step) == (0, 4)
    assert len(trained_on(stopped, 0)) == 4 * 12
    finished = run(how(root, scaling__num_workers=2))
    assert trained_on(finished, 0) == WRITTEN
    assert finished.state.samples == len(WRITTEN)


@pytest.mark.usefixtures("cluster")
def test_a_corrupt_row_group_is_told_in_one_line_and_once(root: Path) -> None:
    make_latents(root / "spoilt", 60, unit_rows=30, group_rows=5, vocabulary=50)
    part = root / "spoilt/latents/parts/000000001.parquet"
    content = bytearray(part.read_bytes())
    content[2000:2100] = bytes(100)
    part.write_bytes(content)
    told = how(root, source__uri=str(root / "spoilt/latents"))
    with pytest.raises(DatasetError, match=r"000000001\.parquet: corrupt row group \d") as caught:
        run(told)
    assert "\n" not in str(caught.value)
    assert not [e for e in RunFolder(open_storage(told.output.uri)).events() if e["event"] == "recovered"]


@pytest.mark.usefixtures("cluster")
def test_a_cluster_without_a_cpu_to_spare_is_told_before_it_waits(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.reader: expected direct, got 'ray': the trainers take all 4 CPUs"):
        run(how(root, scaling__num_workers=4))
