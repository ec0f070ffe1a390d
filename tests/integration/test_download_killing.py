"""Whatever dies in the middle of a download, each address has one outcome in the end, and no part is made twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray._private.state import actors
from ray.cluster_utils import Cluster

from sdp.download import job
from sdp.storage import open_storage
from tests.download_kit import check_exactly_once, config_for, write_urls
from tests.kit import not_none
from tests.local_ray import several_nodes
from tests.misbehaving.server import ImageServer
from tests.programs import processes_with
from tests.waiting import Waiter, until

pytestmark = pytest.mark.slow

STORE = 100_000_000
ROWS, UNIT = 240, 20
WORKER = "MapWorker(MapBatches(Downloader))"


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    """A head without work, and one node that stays; a test adds those that go."""
    with several_nodes({"num_cpus": 2, "labels": {"ray.io/node-group": "gpu"}}) as cluster:
        yield cluster


def slow_urls(server: ImageServer) -> list[str | None]:
    """Return slow URLs, so that there is time for a kill; some are unavailable."""
    return [
        server.image_url(number, "404") if number % 9 == 4 else server.image_url(number, "delay", s=0.2)
        for number in range(ROWS)
    ]


def parts_in(out: Path) -> dict[str, int]:
    """The parts that are there, and when each was written."""
    folder = out / "parts"
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} if folder.is_dir() else {}


def run_beside(act: Callable[[], None], run: Callable[[], "job.DownloadSummary | None"]) -> "job.DownloadSummary":
    """Run a job, and an action at the same time."""
    beside = Waiter(act)
    beside.start()
    summary = run()
    beside.join()
    return not_none(summary)


def test_a_worker_that_is_killed_again_and_again_costs_no_row(server: ImageServer, tmp_path: Path) -> None:
    source = write_urls(tmp_path / "meta", slow_urls(server))
    config = config_for(source, tmp_path / "out", fetch={"connections": 4}, concurrency=2)
    killed = []

    def kill() -> None:
        for wanted in (1, 4):
            until(lambda wanted=wanted: len(parts_in(tmp_path / "out")) >= wanted, f"part {wanted}")  # type: ignore[misc]
            until(lambda: bool(processes_with(WORKER)), "a worker")
            killed.append(processes_with(WORKER)[0])
            os.kill(killed[-1], signal.SIGKILL)
        assert len(parts_in(tmp_path / "out")) < ROWS // UNIT, "it was killed too late to tell anything"

    summary = run_beside(kill, lambda: job.run(config))
    assert len(killed) == 2
    rows = check_exactly_once(summary.dataset, range(ROWS))
    assert sorted(rows) == [row for row in range(ROWS) if row % 9 != 4]


def test_a_driver_that_is_killed_is_continued_by_the_next(nodes: Cluster, server: ImageServer, tmp_path: Path) -> None:
    source = write_urls(tmp_path / "meta", slow_urls(server))
    config = config_for(source, tmp_path / "out", fetch={"connections": 4}, concurrency=1)
    (tmp_path / "download.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "sdp", "download", "--config", str(tmp_path / "download.yaml")]
    environment = {**os.environ, "RAY_ADDRESS": nodes.address, "SDP_TESTS_WARM_PROGRAMS": "1"}
    driver = subprocess.Popen(command, env=environment)
    try:
        until(lambda: len(parts_in(tmp_path / "out")) >= 2, "the second part")
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    kept = parts_in(tmp_path / "out")
    assert len(kept) < ROWS // UNIT, "it was killed too late to tell anything"
    assert not open_storage(str(tmp_path / "out")).exists("_manifest.json")

    dataset = not_none(job.run(config)).dataset
    parts = parts_in(tmp_path / "out")
    assert {name: parts[name] for name in kept} == kept, "a part was made twice"
    check_exactly_once(dataset, range(ROWS))


def test_a_node_that_goes_takes_no_row_with_it(nodes: Cluster, server: ImageServer, tmp_path: Path) -> None:
    source = write_urls(tmp_path / "meta", slow_urls(server))
    config = config_for(source, tmp_path / "out", fetch={"connections": 4}, concurrency=4)
    doomed = nodes.add_node(num_cpus=2, object_store_memory=STORE)
    nodes.wait_for_nodes()

    def remove() -> None:
        until(lambda: len(processes_with(WORKER)) >= 4, "the fourth worker")
        until(lambda: len(parts_in(tmp_path / "out")) >= 1, "the first part")
        nodes.remove_node(doomed, allow_graceful=False)

    summary = run_beside(remove, lambda: job.run(config))
    check_exactly_once(summary.dataset, range(ROWS))


def test_workers_stay_on_nodes_with_the_labels_asked_for(nodes: Cluster, server: ImageServer, tmp_path: Path) -> None:
    source = write_urls(tmp_path / "meta", slow_urls(server)[:120])
    plain = nodes.add_node(num_cpus=2, labels={"ray.io/node-group": "plain"}, object_store_memory=STORE)
    nodes.wait_for_nodes()
    before = set(actors())
    labels = {"ray.io/node-group": "in(plain,other)"}
    try:
        everywhere = {"concurrency": None, "workers": {"cpus": 1, "node_labels": labels}}
        summary = job.run(config_for(source, tmp_path / "out", **everywhere))
    finally:
        nodes.remove_node(plain, allow_graceful=False)
    workers = [actor for key, actor in actors().items() if key not in before and actor["ActorClassName"] == WORKER]
    assert [actor["Address"]["NodeID"] for actor in workers] == [plain.node_id] * 2
    check_exactly_once(not_none(summary).dataset, range(120))
