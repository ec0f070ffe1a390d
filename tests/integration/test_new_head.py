"""A head in place of a lost one: a job is there before the nodes, waits for them, and uses all of them."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from sdp.config import WorkersConfig
from sdp.download import job as download_job
from sdp.process import job as process_job
from sdp.ray import waiting
from sdp.runners.placement import join
from sdp.storage import open_storage
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from tests.download_kit import config_for, write_urls
from tests.local_ray import several_nodes
from tests.misbehaving.server import ImageServer
from tests.process_kit import config_of, make_images
from tests.training import config
from tests.waiting import until

DEADLINE_S = 240
NOTHING = "(0 of 1 ready); the cluster has nothing\n"


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A head without work, and no other node."""
    with several_nodes() as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)  # as in a RayJob
        yield nodes


@pytest.fixture
def joined(
    head: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """Return a function that runs a job, adds nodes of a kind, each once the job has said something, and its result."""
    monkeypatch.setattr(waiting, "_FIRST_LINE_S", 0.0)
    monkeypatch.setattr(waiting, "_LINES_S", 0.2)
    nodes = []

    def result_of(job: Callable[[], Any], lines: list[str], **node: Any) -> Any:
        results, said = list[Any](), ""
        thread = threading.Thread(target=lambda: results.append(job()), daemon=True)
        thread.start()

        def has_said(line: str) -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return line in said

        for line in lines:
            until(lambda: has_said(line), line, DEADLINE_S)  # noqa: B023 (called before the next)
            nodes.append(head.add_node(object_store_memory=150_000_000, **node))
        thread.join(DEADLINE_S)
        assert len(results) == 1, said + capsys.readouterr().err
        return results[0]

    yield result_of
    for node in nodes:
        head.remove_node(node)


def gpu(accelerator: str) -> dict[str, Any]:
    return {"num_cpus": 2, "num_gpus": 1, "labels": {"ray.io/accelerator-type": accelerator}}


def test_a_training_waits_for_its_accelerator_and_for_nodes_that_join_one_after_another(
    joined: Callable[..., Any], root: Path
) -> None:
    how = config(root, max_steps=2, scaling__accelerator="A100", scaling__num_workers={"min": 1, "max": 2})
    lines = ["train: waiting for 2 A100 GPUs (0 of 2 ready, ", "(1 of 2 ready, "]
    assert joined(lambda: run(how), lines, **gpu("A100")).state.step == 2
    (training,) = [each for each in RunFolder(open_storage(how.output.uri)).events() if each["event"] == "training"]
    assert len(training["workers"]) == 2


def test_a_process_job_waits_for_its_accelerator(joined: Callable[..., Any], tmp_path: Path, model: Path) -> None:
    make_images(tmp_path, rows=20, unit_rows=20)
    how = config_of(tmp_path / "images", tmp_path / "out", model, "encode.accelerator=A10G")
    lines = [f"encode: waiting for 1 A10G GPU {NOTHING}"]
    assert joined(lambda: process_job.run(how), lines, **gpu("A10G")).figures.images_encoded == 18


def test_a_download_counts_its_workers_once_a_node_is_there(
    joined: Callable[..., Any], server: ImageServer, tmp_path: Path
) -> None:
    source = write_urls(tmp_path / "meta", [server.image_url(number) for number in range(40)])
    how = config_for(source, tmp_path / "out", concurrency=None, workers={"cpus": 1})
    summary = joined(lambda: download_job.run(how), [f"download: waiting for 1 CPU {NOTHING}"], num_cpus=2)
    assert summary.figures.workers == 2


def test_generators_wait_for_their_accelerator(joined: Callable[..., Any]) -> None:
    job = partial(join, "generate", "generator", WorkersConfig(accelerator="A10G"), "out", 5)
    assert joined(job, ["generate: waiting for 1 A10G GPU (0 of 1 ready, "], **gpu("A10G")).gpus == 1
