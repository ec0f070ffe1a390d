"""A piece that ends whole nodes, on a cluster of several raylets."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import ray

from sdp.encode.chunk import TransformStats
from sdp.encode.pipeline import Pipeline
from sdp.encode.placement import Placement
from sdp.encode.work import TRIES
from sdp.ray.lost import _raylet_of
from tests.local_ray import several_nodes


@dataclass(frozen=True)
class Deadly:
    """Stages of which one piece ends the node of its encoder."""

    piece: int

    def transform(self, item: int) -> tuple[int, TransformStats]:
        return item, TransformStats(items=1)

    def load(self) -> None:
        return None

    def encode(self, encoder: None, value: int) -> int:  # noqa: ARG002 (its signature is the pipeline's)
        if value == self.piece:
            raylet = _raylet_of(ray.get_runtime_context().get_node_id())
            assert raylet is not None
            os.kill(raylet, signal.SIGKILL)
            time.sleep(60)  # which Ray ends with it
        return value


def test_a_piece_that_ends_nodes_ends_no_more_of_them_than_it_has_tries() -> None:
    """Each node comes after the piece was sent again: until then there is no room for its next encoder."""
    reasons: dict[Any, str | None] = {}
    placement = Placement(1, 1, None, 0.0, 1.0, 1.0, 600.0, {}, None, "out")
    # The driver connects to the head, which has no room for an encoder.
    with several_nodes() as cluster, Pipeline(Deadly(3), placement, 1) as pipeline:
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
