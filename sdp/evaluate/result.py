"""From features to the figures of an evaluation, and what is said of them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

import sdp
from sdp.config import EvaluateConfig
from sdp.datasets.manifest import Dataset
from sdp.datasets.parts import iter_rows
from sdp.evaluate.layout import CLIP, FEATURES
from sdp.evaluate.loss import LossFound, LossOrders
from sdp.evaluate.metrics import (
    LEAST_FOR_INFINITY,
    Frechet,
    Held,
    frechet_infinity,
    kernel_distance,
    mean_and_error,
)

FORMAT = 1
_MOST_HELD = 50_000
"""Pictures of a set of which the features are held in memory, for subsets: 400 MB of Inception's."""
_BATCH = 4096
_SMALL = 10_000
"""Pictures below which FID is told with a warning."""


@dataclass(frozen=True)
class Looked:
    """A set of pictures that was looked at, and the addresses of it that are taken down by now."""

    dataset: Dataset
    taken_down: bytes = b""

    def batches(self, column: str) -> Iterator[pa.RecordBatch]:
        gone = BitMap64.deserialize(self.taken_down) if self.taken_down else BitMap64()
        parts = self.dataset.parts
        for path, written in zip(parts["path"].to_pylist(), parts["written"].to_pylist(), strict=True):
            if not written:
                continue
            for batch in iter_rows(self.dataset.storage, path, ["row", column], _BATCH):
                if gone:
                    batch = batch.filter(pa.array([row not in gone for row in batch["row"].to_pylist()]))
                yield batch

    def features(self) -> Iterator[NDArray[np.float32]]:
        """All of them, a batch at a time."""
        for batch in self.batches(FEATURES):
            column = batch[FEATURES]
            width = column.type.byte_width
            raw = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :][: len(column) * width]
            yield raw.view(np.float32).reshape(len(column), width // 4)

    def scores(self) -> NDArray[np.float32]:
        """The CLIP scores that there are."""
        columns = [batch[CLIP].drop_null().to_numpy() for batch in self.batches(CLIP)]
        return np.concatenate([np.zeros(0, np.float32), *columns])


def clip_score(looked: Looked) -> dict[str, Any]:
    """The mean of 100 · cosine."""
    scores = looked.scores()
    if not len(scores):
        return {"score": None, "pictures": 0}
    mean, error = mean_and_error(scores)
    return {"score": mean, "standard_error": error, "pictures": len(scores)}


def distances(generated: Looked, reference: Looked, config: EvaluateConfig) -> dict[str, Any]:
    """FID, FID-infinity and KID."""
    ours, theirs = (_held(side, config.seed) for side in (generated, reference))
    assert ours.moments is not None
    assert theirs.moments is not None
    frechet = Frechet(theirs.moments.gaussian())
    counts = {"generated": ours.moments.count, "reference": theirs.moments.count}
    found: dict[str, Any] = {"fid": {"value": frechet.to(ours.moments.gaussian()), **counts}}
    infinity = frechet_infinity(ours.rows, frechet, config.fid.infinity_points, config.seed)
    found["fid_infinity"] = asdict(infinity) if infinity is not None else None
    kid = kernel_distance(ours.rows, theirs.rows, config.kid.subsets, config.kid.subset_size, config.seed)
    found["kid"] = asdict(kid) if kid is not None else None
    return found


def similarity(generated: Looked, reference: Looked) -> float:
    """The mean cosine over all pairs of a picture of each set: CLIP-I and DINO of the DreamBooth paper."""
    ours, theirs = (_mean_direction(side) for side in (generated, reference))
    return float(ours @ theirs)


def _mean_direction(looked: Looked) -> NDArray[np.float64]:
    rows = np.concatenate(list(looked.features())).astype(np.float64)
    mean: NDArray[np.float64] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0)
    return mean


def _held(looked: Looked, seed: int) -> Held:
    return Held(_MOST_HELD, looked.dataset.manifest.counts.written, seed).take(looked.features())


def loss_figures(orders: LossOrders, found: LossFound) -> dict[str, Any]:
    """The loss of a checkpoint."""
    return {
        "checkpoint": orders.checkpoint.uri,
        "run": orders.checkpoint.uri.rpartition("/checkpoints/")[0],
        "weights": "ema" if orders.ema else "raw",
        "dataset": orders.dataset,
        "held_out_of_training": orders.source is None,
        "mean": found.mean,
        "standard_error": found.error,
        "rows": found.rows,
        "by_timestep": dict(found.by_timestep),
    }


def notes(figures: Mapping[str, Any], config: EvaluateConfig) -> list[str]:
    """What a reader has to know before comparing."""
    said = []
    if "fid" in figures:
        least = min(figures["fid"]["generated"], figures["fid"]["reference"])
        if least < _SMALL:
            said.append(
                f"FID of {least:,} pictures is too high, and the more so the fewer there are: compare it with sets of "
                "the same sizes alone; KID does not depend on them"
            )
        if figures["fid_infinity"] is None and config.fid.infinity_points:
            said.append(f"no FID-infinity: it needs {LEAST_FOR_INFINITY:,} pictures")
    return said


def to_bytes(figures: Mapping[str, Any], config: EvaluateConfig) -> bytes:
    """evaluation.json."""
    data = {
        "format": FORMAT,
        "kind": "evaluation",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "sdp": sdp.__version__,
        **figures,
        "notes": notes(figures, config),
        "config": config.model_dump(mode="json"),
    }
    return (json.dumps(data, indent=1, default=str) + "\n").encode()
