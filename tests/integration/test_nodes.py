"""On a cluster of several kinds of nodes (on this machine, accelerators made up) each stage lands where it should."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

from sdp.datasets import parts
from sdp.generate import job as generate
from sdp.process import job
from tests.generate_kit import generate_config, make_checkpoint, tiny_model
from tests.kit import accounted, not_none, rows_of
from tests.local_ray import several_nodes
from tests.process_kit import config_of, follow_instructions, make_images
from tests.waiting import as_soon_as

STORE = 100_000_000


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    (folder / "wanted").write_text("1")
    return folder


@pytest.fixture(scope="module")
def nodes(traces: Path) -> Iterator[Cluster]:
    """A head without work, a CPU node, one with two A10G, one with an A100."""
    machines: list[dict[str, Any]] = [{"num_cpus": 2, "labels": {"ray.io/node-group": "cpu"}}]
    for kind, gpus in (("A10G", 2), ("A100", 1)):
        labels = {"ray.io/accelerator-type": kind, "ray.io/node-group": kind.lower()}
        machines.append({"num_cpus": 2, "num_gpus": gpus, "labels": labels})
    with several_nodes(*machines, setup=lambda: follow_instructions(str(traces))) as cluster:
        yield cluster


def group_of(node: str) -> str:
    labels = next(n["Labels"] for n in ray.nodes() if n["NodeID"] == node)
    return str(labels.get("ray.io/node-group", "head"))


def wait_for_encoders(traces: Path, count: int) -> None:
    """From now on nothing is encoded until so many encoders are ready."""
    for note in traces.iterdir():
        note.unlink()
    (traces / "wanted").write_text(str(count))


def encoders_in(traces: Path) -> int:
    return len({note.name.split("-")[0] for note in traces.glob("[0-9]*-*")})


@pytest.mark.usefixtures("nodes")
def test_transforms_run_on_the_cpu_node_and_encoders_on_the_accelerator_asked_for(
    tmp_path: Path, model: Path, traces: Path
) -> None:
    wait_for_encoders(traces, 2)
    make_images(tmp_path, rows=80, unit_rows=20)
    settings = ("encode.accelerator=A10G", "encode.num_workers=2", "transform.node_labels={ray.io/node-group: cpu}")
    summary = job.run(config_of(tmp_path / "images", tmp_path / "out", model, "output.rows_per_file=20", *settings))
    assert summary.dataset is not None
    assert summary.dataset.manifest.counts.written == 72
    assert {group_of(node) for node in summary.figures.transformed_on} == {"cpu"}
    assert {group_of(node) for node in summary.figures.encoded_on} == {"a10g"}
    assert sum(summary.figures.encoded_on.values()) == 72
    assert encoders_in(traces) == 2


@pytest.mark.usefixtures("nodes", "one_thread")
def test_generators_run_on_the_accelerator_asked_for_and_draw_the_same_pictures(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "run", tiny_model(tmp_path / "model"))

    def draw(name: str, **scaling: Any) -> list[str]:
        more = {"images_per_prompt": 2, "scaling": scaling}
        dataset = not_none(generate.run(generate_config(tmp_path / name, checkpoint, ["a", "b", "c"], **more)))
        digests: list[str] = rows_of(dataset)["sha256"].to_pylist()
        return digests

    expected, before = draw("one", accelerator="cpu"), generators()
    assert draw("bilder-ä", num_workers=2, accelerator="A10G") == expected  # the name is a tag of Ray's metrics
    mine = [actor for key, actor in generators().items() if key not in before]
    assert [group_of(actor["Address"]["NodeID"]) for actor in mine] == ["a10g", "a10g"]


def generators() -> dict[str, Any]:
    """All that there have been on this Ray."""
    return {key: actor for key, actor in actors().items() if "MapWorker" in actor["ActorClassName"]}


@pytest.mark.slow
def test_a_node_that_goes_takes_no_row_with_it(nodes: Cluster, tmp_path: Path, model: Path, traces: Path) -> None:
    """It takes an encoder, what that was encoding, and rows that were waiting in its memory to be written."""
    wait_for_encoders(traces, 2)
    make_images(tmp_path, rows=300, unit_rows=50)
    labels = {"ray.io/accelerator-type": "L4", "ray.io/node-group": "l4"}
    spare = {"num_cpus": 2, "num_gpus": 1, "labels": labels, "object_store_memory": STORE}
    doomed = nodes.add_node(**spare)
    nodes.add_node(**spare)
    nodes.wait_for_nodes()
    parts_folder = tmp_path / "out" / "parts"

    remover = as_soon_as(
        lambda: parts_folder.exists() and any(parts_folder.iterdir()),
        lambda _: nodes.remove_node(doomed, allow_graceful=False),
    )
    settings = ("encode.accelerator=L4", "encode.num_workers=2", "output.rows_per_file=10", "encode.batch_size=1")
    summary = job.run(config_of(tmp_path / "images", tmp_path / "out", model, *settings))
    remover.join()
    assert summary.dataset is not None
    for file in summary.dataset.storage.list("parts"):
        parts.verify_part(summary.dataset.storage, file)
    assert sorted(accounted(summary.dataset)) == [row for row in range(300) if row % 10 != 7]
    assert summary.figures.deaths >= 1
