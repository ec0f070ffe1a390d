"""The stages on Ray: pieces through `sdp.encode.pipeline`, and tasks that write parts."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import ObjectLostError, RayTaskError

from sdp.config.process import ProcessConfig
from sdp.config.score import ScoreConfig
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.encode.blocks import pack, unpack
from sdp.encode.pipeline import Pipeline
from sdp.encode.placement import plan_placement
from sdp.encode.work import PieceRows, RowsSpec
from sdp.process.local import RowsLost, write_unit
from sdp.ray import cluster
from sdp.ray.lost import unwrapped

_WRITE_RETRIES = 3
"""Retries of a task whose process dies."""


class OnRay(Pipeline):
    """A running pipeline, whose rows stay on the nodes that encoded them."""

    def __init__(self, config: ProcessConfig | ScoreConfig, stages: RowsSpec, piece_bytes: int) -> None:
        """Connect to Ray, and refuse what could never start there."""
        resources, can_grow = cluster.connect(), "RAY_ADDRESS" in os.environ
        cluster.require_accelerator("encode.accelerator", config.encode.gpu_type, can_grow=can_grow)
        cluster.require_labels("transform.node_labels", config.transform.node_labels, can_grow=can_grow)
        self._stages = ray.put(stages)
        placement = plan_placement(config.encode, config.transform, config.output.uri, resources)
        super().__init__(stages, placement, piece_bytes)

    def keep(self, rows: PieceRows) -> "ray.ObjectRef[pa.Table]":
        """Return a reference to rows that no encoder has made."""
        return ray.put(pack(None, rows))

    def write(self, work: Work, retried: Mapping[str, int], pieces: Sequence[Any]) -> Future[PartInfo]:
        """Begin to write the part of a unit."""
        task: Any = _write
        part: Future[PartInfo] = task.remote(self._stages, work, retried, *pieces).future()
        return part

    def written(self, part: Future[PartInfo]) -> PartInfo:
        """Return the part that has been written; raise RowsLost if a node took its rows with it."""
        try:
            return part.result()
        except ObjectLostError as error:
            raise RowsLost from error
        except RayTaskError as error:
            if (own := unwrapped(error)) is not None:
                raise own from error
            raise error.cause from error


@ray.remote(num_cpus=0.1, max_retries=_WRITE_RETRIES)
def _write(stages: RowsSpec, work: Work, retried: Mapping[str, int], *pieces: pa.Table) -> PartInfo:
    return write_unit(stages, work, retried, [unpack(piece)[1] for piece in pieces])
