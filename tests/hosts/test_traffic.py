"""The hosts of a job's stages, and the bytes that cross each link."""

from dataclasses import dataclass
from typing import Any

import pytest

from sdp.train.run_folder import RunFolder
from tests.hosts.cluster import Cluster
from tests.hosts.stages import EMBEDDINGS, MOMENTS, PIXELS, ROWS, online, process

pytestmark = [pytest.mark.needs("ip", "tc", "versitygw"), pytest.mark.timeout(1200)]
CONTROL = 2_000_000
"""The most that Ray's own messages, code and logs take on a link during a job."""


@dataclass(frozen=True)
class Crossed:
    """The bytes that a job has sent over each link."""

    before: dict[tuple[str, str], int]
    after: dict[tuple[str, str], int]

    def __call__(self, one: str, other: str) -> int:
        return self.after[one, other] - self.before[one, other]

    def __str__(self) -> str:
        links = {link: self(*link) / 1e6 for link in self.after}
        return ", ".join(f"{one} to {other}: {mb:.2f} MB" for (one, other), mb in links.items() if mb > 0.02)


@pytest.fixture(scope="module")
def processed(cluster: Cluster) -> tuple[dict[str, Any], Crossed]:
    before = cluster.network.traffic()
    job = cluster.start("process", process(f"{cluster.uri}/images", f"{cluster.uri}/latents"))
    job.end_well()
    crossed = Crossed(before, cluster.network.traffic())
    print(f"process: {crossed}")
    return job.places, crossed


def test_transforms_and_encoders_run_on_the_hosts_that_their_labels_name(
    cluster: Cluster, processed: tuple[dict[str, Any], Crossed]
) -> None:
    nodes, places = cluster.nodes(), processed[0]
    assert {nodes[node]: rows for node, rows in places["transformed_on"].items()} == {"cpu": ROWS}
    assert {nodes[node]: rows for node, rows in places["encoded_on"].items()} == {"a10g": ROWS}


def test_process_sends_pixels_once_and_latents_once_and_neither_by_the_driver(
    processed: tuple[dict[str, Any], Crossed],
) -> None:
    places, crossed = processed
    assert PIXELS < crossed("cpu", "a10g") < 1.05 * PIXELS + 200_000, str(crossed)
    # Ray chooses where a part is written: its rows leave the encoders' host once, and not for the head.
    left = sum(crossed("a10g", host) for host in ("cpu", "a100", "store"))
    assert 0.9 * places["bytes_written"] < left < 1.1 * places["bytes_written"] + 200_000, str(crossed)
    for host in ("cpu", "a10g", "a100", "store"):
        assert crossed(host, "head") < CONTROL, str(crossed)
        assert crossed("head", host) < CONTROL, str(crossed)


def test_online_training_sends_pixels_once_and_latents_once_and_neither_by_the_driver(cluster: Cluster) -> None:
    before = cluster.network.traffic()
    cluster.start("train", online(f"{cluster.uri}/images", f"{cluster.uri}/run")).end_well()
    crossed = Crossed(before, cluster.network.traffic())
    print(f"online training: {crossed}")
    (start,) = [event for event in RunFolder(cluster.storage("run")).events() if event["event"] == "training"]
    assert [worker.split()[0] for worker in start["workers"]] == ["a100"]
    assert PIXELS < crossed("cpu", "a10g") < 1.05 * PIXELS + 200_000, str(crossed)
    encoded = MOMENTS + EMBEDDINGS
    assert encoded < crossed("a10g", "a100") < 1.05 * encoded + 200_000, str(crossed)
    for host in ("cpu", "a10g", "a100", "store"):
        assert crossed(host, "head") < CONTROL, str(crossed)
