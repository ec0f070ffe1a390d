"""A piece that ends whole nodes, on a cluster of several raylets."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import ray

from sdp.ray.lost import _raylet_of
from sdp.runners.on_ray import OnRay
from sdp.runners.placement import Placement
from sdp.runners.stages import TRIES, PrepareStats
from tests.local_ray import several_nodes


@dataclass(frozen=True)
class Deadly:
    """Stages of which one piece ends the node of its encoder."""

    piece: int

    def prepare(self, item: int) -> tuple[int, PrepareStats]:
        return item, PrepareStats(items=1)

    def load(self) -> None:
        return None

    def work(self, worker: None, value: int) -> int:  # noqa: ARG002 (its signature is the runner's)
        if value == self.piece:
            raylet = _raylet_of(ray.get_runtime_context().get_node_id())
            assert raylet is not None
            os.kill(raylet, signal.SIGKILL)
            time.sleep(60)  # which Ray ends with it
        return value


def test_a_piece_that_ends_nodes_ends_no_more_of_them_than_it_has_tries() -> None:
    """Each node comes after the piece was sent again: until then there is no room for its next encoder."""
    reasons: dict[Any, str | None] = {}
    placement = Placement(wait_s=600.0, output="out")
    # The driver connects to the head, which has no room for an encoder.
    with several_nodes() as cluster, OnRay(Deadly(3), placement, 1) as pipeline:
        for number in range(6):
            pipeline.feed(number, number)
        deadly, started, deadline = pipeline._sent[3], 0, time.monotonic() + 240
        while len(reasons) < 6 and time.monotonic() < deadline:
            if started < len(deadly.numbers) and started <= TRIES:
                cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
                started += 1
            pipeline.state()
            reasons.update((key, note.died) for key, note, _ in pipeline.results(0.5))
    assert reasons == {**dict.fromkeys(range(6)), 3: "its node is gone"}
    assert started == 1 + TRIES
