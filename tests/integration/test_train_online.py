"""Images, transform, encoders and trainers in one job: `data.mode: online`, on a local Ray of several nodes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from sdp.config.train import TrainConfig
from sdp.datasets.manifest import open_dataset
from sdp.errors import LeaseLost, SdpError
from sdp.model.sources import resolve
from sdp.ray.cluster import start_beside_driver
from sdp.runners.placement import Placement
from sdp.storage import open_storage
from sdp.train.board import Board
from sdp.train.data.images import Slice, open_images
from sdp.train.driver import TrainSummary
from sdp.train.job import run
from sdp.train.online import start_pool
from sdp.train.run_folder import RunFolder
from tests.local_ray import several_nodes
from tests.process_kit import DEADLY, make_images, picture
from tests.training import bad_rows, config, ledger
from tests.waiting import as_soon_as

pytestmark = pytest.mark.timeout(900)  # a minute each; many processes start, so that a busy machine takes several

ROWS = 120
DEADLINE_S = 600
BAD, KILLER = 13, 37
SPOILT = "spoilt"


def prepare_worker(traces: str) -> None:
    """Prepare a worker process: pictures that end in DEADLY kill their transform, and encoders leave notes.

    A file named SPOILT lets one encoder fail for good.
    """
    from sdp.encode import transform
    from sdp.train.data import images

    stages, folder = images.ImagesDataset, Path(traces)
    read_header, load_encoder, encode = transform.read_header, stages.load, stages.work

    def deadly(data: Any, *rest: Any) -> Any:
        if bytes(data[-len(DEADLY) :]) == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_header(data, *rest)

    def noted(settings: Any, device: str | None = None) -> Any:
        if (spoilt := folder / SPOILT).exists():
            spoilt.unlink()
            raise SdpError("no encoder today")
        node = ray.get_runtime_context().get_node_id()
        (folder / f"encoder-{os.getpid()}-{node}").touch()
        return load_encoder(settings, device)

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.1)
        return encode(*arguments)

    transform.read_header, stages.load, stages.work = deadly, noted, slowly  # type: ignore[method-assign]
    from sdp.model import load

    load_text_encoder = load.load_text_encoder

    def noted_text(*arguments: Any, **more: Any) -> Any:
        (folder / f"text-{os.getpid()}-{ray.get_runtime_context().get_node_id()}").touch()
        return load_text_encoder(*arguments, **more)

    load.load_text_encoder = noted_text


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def nodes(traces: Path) -> Iterator[Cluster]:
    """A head without CPUs, a CPU node, two A10G and one A100, as Ray sees them."""
    machines: list[dict[str, Any]] = [{"num_cpus": 4, "labels": {"ray.io/node-group": "cpu"}}]
    for kind in ("A10G", "A100"):
        machines.append({"num_cpus": 4, "num_gpus": 2, "labels": {"ray.io/accelerator-type": kind}})
    with several_nodes(*machines, setup=lambda: prepare_worker(str(traces))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, one of which cannot be decoded, and one kills its decoder."""
    return spoilt_images(tmp_path_factory.mktemp("online"), {BAD: b"no picture", KILLER: picture(KILLER) + DEADLY})


def spoilt_images(root: Path, spoilt: dict[int, bytes]) -> Path:
    torch.set_num_threads(1)
    image = lambda row: spoilt.get(row) or picture(row)  # noqa: E731
    make_images(root, ROWS, unit_rows=30, fails=lambda row: row % 10 == 0, image=image)
    return root


@pytest.fixture
def root(images: Path, tmp_path: Path, traces: Path) -> Path:
    for note in traces.iterdir():
        note.unlink()
    (tmp_path / "images").symlink_to(images / "images")
    return tmp_path


def how(root: Path, run: str = "run", **changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "source__uri": str(root / "images"), "model__source": "builtin:tiny", "data__mode": "online",
        "encode__dtype": "fp32", "encode__batch_size": 8, "encode__accelerator": "A10G",
        "transform__node_labels": {"ray.io/node-group": "cpu"},
        "scaling__accelerator": "A100",
        "scaling__num_workers": 2, "data__batch_size": 4, "max_steps": None, "max_epochs": 1, "log__every_steps": 1,
    }  # fmt: skip
    return config(root, run, **{**usual, **changes})


GOOD = [row for row in range(ROWS) if row % 10 and row not in (BAD, KILLER)]


def trained_on(summary: TrainSummary, epoch: int = 0) -> list[int]:
    return list(ledger(summary).rows(epoch))


def encoder_pids(traces: Path) -> list[int]:
    notes = sorted(traces.glob("encoder-*"), key=lambda note: note.stat().st_mtime)
    return [int(note.name.split("-")[1]) for note in notes]


@pytest.mark.usefixtures("nodes")
def test_the_pool_answers_while_more_requests_are_open_than_ray_s_usual_limit(root: Path) -> None:
    nowhere = Placement(labels={"ray.io/accelerator-type": "H100"}, gpus=1.0, cpus=0.0, wait_s=DEADLINE_S, output="out")
    one = Slice.of("gone.parquet", 0, 1, 0, 0, np.ones(1, np.bool_))
    images = open_images(how(root), open_dataset(open_storage(str(root / "images"))), resolve("builtin:tiny"))
    pool = start_pool(images, nowhere, start_beside_driver(Board), 1200)
    try:
        requests = [pool.encode.remote(one, turn) for turn in range(1200)]
        figures, _ = ray.get(pool.status.remote(), timeout=60)
        assert figures["encoded"] == 0
        assert not ray.wait(requests, timeout=0)[0]
    finally:
        ray.kill(pool)


@pytest.mark.usefixtures("nodes")
def test_every_good_row_is_trained_on_once_each_part_on_its_nodes_and_bad_rows_are_told(
    root: Path, traces: Path
) -> None:
    low = GOOD[3:5]
    pq.write_table(pa.table({"row": range(ROWS), "score": [float(row not in low) for row in range(ROWS)]}), root / "t")
    curated = {"source__tables": [{"uri": str(root / "t")}], "filters": {"score": {"min": 0.5}}}
    summary = run(how(root, encode__num_workers=2, **curated))
    folder = RunFolder(open_storage(str(root / "run")))
    assert trained_on(summary) == [row for row in GOOD if row not in low]
    assert summary.recoveries == 0
    assert bad_rows(folder) == {BAD: "not_an_image", KILLER: "crashed"}
    labels = {node["NodeID"]: node["Labels"].get("ray.io/accelerator-type") for node in ray.nodes()}
    landed = [[labels[note.name.split("-")[2]] for note in traces.glob(f"{what}-*")] for what in ("encoder", "text")]
    assert landed == [["A10G", "A10G"], ["A10G", "A10G"]], "trainers load no text encoder"
    assert folder.metrics()[-1]["encoders"] == 2


@pytest.mark.slow
def test_a_failed_pool_dying_encoders_nodes_and_trainers_cost_no_row_and_change_no_step(
    tmp_path: Path, traces: Path, nodes: Cluster
) -> None:
    for note in traces.iterdir():
        note.unlink()
    (traces / SPOILT).touch()
    root = spoilt_images(tmp_path, {BAD: b"no picture"})
    store, labels = 150_000_000, {"ray.io/accelerator-type": "A10G"}
    extra = nodes.add_node(num_cpus=2, num_gpus=1, labels=labels, object_store_memory=store)
    nodes.wait_for_nodes()
    how_long = how(root, encode__num_workers=3, checkpoint__every_steps=3, max_epochs=3)
    folder = RunFolder(open_storage(how_long.output.uri))
    trainers: list[int] = []

    def strike(step: int, blow: Callable[[], Any]) -> threading.Thread:
        return as_soon_as(lambda: max([0, *_checkpoints(folder)]) >= step, lambda _: blow())

    def kill_encoder() -> None:
        os.kill(encoder_pids(traces)[-1], signal.SIGKILL)

    def kill_trainer() -> None:
        event = [event for event in folder.events() if event["event"] in ("training", "recovered")][-1]
        trainers.extend(int(worker.rpartition(" ")[2]) for worker in event["workers"])
        os.kill(trainers[1], signal.SIGKILL)

    blows = [strike(3, kill_encoder), strike(9, kill_trainer), strike(18, lambda: nodes.remove_node(extra))]
    summary = run(how_long)
    for blow in blows:
        blow.join(timeout=1)
        assert not blow.is_alive()
    assert summary.recoveries == 2, "a new pool after the first failed, and new trainers after one was killed"
    rows = sorted([*GOOD, KILLER])  # no killer here
    assert all(trained_on(summary, epoch) == rows for epoch in range(3))
    assert summary.state.samples == 3 * len(rows)
    told_deaths = [event for event in folder.events() if "an encoder died" in event.get("reason", "")]
    assert len(told_deaths) >= 2


@pytest.mark.usefixtures("nodes")
@pytest.mark.slow
def test_a_range_of_encoders_means_as_many_as_have_places_and_a_lost_lease_ends_them(
    root: Path, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdp.lease._BEAT_S", 0.5)
    rows = {"limit": 30, "max_epochs": None, "encode__text": "token_ids", "scaling__num_workers": 1}
    some = how(root, encode__num_workers={"min": 1, "max": 2}, max_steps=100_000, **rows)
    folder = RunFolder(open_storage(some.output.uri))

    def ready() -> list[int]:
        return [line["step"] for line in folder.metrics() if line.get("encoders") == 2]

    stop = as_soon_as(ready, lambda _: folder.storage.publish("_lease/0000000002.json", b"another's"), DEADLINE_S)
    with pytest.raises(LeaseLost):
        run(some)
    stop.join()
    assert len(encoder_pids(traces)) == 2


def _checkpoints(folder: RunFolder) -> list[int]:
    return [event["step"] for event in folder.events() if event["event"] == "checkpoint"]
