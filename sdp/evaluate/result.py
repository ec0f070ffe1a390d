"""The figures of an evaluation, computed from features, and remarks on them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

import sdp
from sdp.config import EvaluateConfig
from sdp.datasets.manifest import Dataset
from sdp.datasets.parts import iter_rows
from sdp.errors import DatasetError
from sdp.evaluate.layout import CLIP, FEATURES
from sdp.evaluate.loss import LossSpec
from sdp.evaluate.metrics import (
    LEAST_FOR_INFINITY,
    Frechet,
    frechet_infinity,
    kernel_distance,
    mean_and_error,
    moments_and_sample,
)
from sdp.model.checkpoints import run_of

if TYPE_CHECKING:
    from sdp.train.validation import Validation

FORMAT = 1
_MOST_HELD = 50_000
"""Most pictures of a set whose features are kept in memory for subsets: 400 MB of Inception's."""
_BATCH = 4096
_SMALL = 10_000
"""FID of fewer pictures comes with a warning."""


@dataclass(frozen=True)
class FeatureSet:
    """The features of a set of pictures, and the addresses that have been taken down since."""

    dataset: Dataset
    taken_down: BitMap64

    def batches(self, column: str) -> Iterator[pa.RecordBatch]:
        """Yield batches of `row` and a column, without rows taken down."""
        parts = self.dataset.parts
        for path, written in zip(parts["path"].to_pylist(), parts["written"].to_pylist(), strict=True):
            if not written:
                continue
            for batch in iter_rows(self.dataset.storage, path, ["row", column], _BATCH):
                if self.taken_down:
                    batch = batch.filter(pa.array([row not in self.taken_down for row in batch["row"].to_pylist()]))
                yield batch

    def features(self) -> Iterator[NDArray[np.float32]]:
        """Yield all features, a batch at a time."""
        for batch in self.batches(FEATURES):
            width = batch[FEATURES].type.byte_width // 4
            yield np.frombuffer(b"".join(batch[FEATURES].to_pylist()), np.float32).reshape(len(batch), width)

    def scores(self) -> NDArray[np.float32]:
        """Return the CLIP scores of all pictures that have one."""
        columns = [batch[CLIP].drop_null().to_numpy() for batch in self.batches(CLIP)]
        return np.concatenate([np.zeros(0, np.float32), *columns])


def clip_score(features: FeatureSet) -> dict[str, Any]:
    """Return the CLIP score: the mean of 100 · cosine."""
    scores = features.scores()
    if not len(scores):
        return {"score": None, "pictures": 0}
    mean, error = mean_and_error(scores)
    return {"score": mean, "standard_error": error, "pictures": len(scores)}


def distances(generated: FeatureSet, reference: FeatureSet, config: EvaluateConfig) -> dict[str, Any]:
    """Return FID, FID-infinity and KID."""
    (drawn, drawn_rows), (target, target_rows) = (
        moments_and_sample(features.features(), _MOST_HELD, features.dataset.manifest.counts.written, config.seed)
        for features in (generated, reference)
    )
    for features, moments in ((generated, drawn), (reference, target)):
        if moments.count < 2:
            raise DatasetError(
                f"{features.dataset.storage.uri}: expected features of 2 pictures or more that are not taken down, got "
                f"{moments.count}; add pictures"
            )
    frechet = Frechet(target.gaussian())
    infinity = frechet_infinity(drawn_rows, frechet, config.fid.infinity_points, config.seed)
    kid = kernel_distance(drawn_rows, target_rows, config.kid.subsets, config.kid.subset_size, config.seed)
    return {
        "fid": {
            "value": frechet.to(drawn.gaussian()),
            "generated": drawn.count,
            "reference": target.count,
        },
        "fid_infinity": asdict(infinity) if infinity is not None else None,
        "kid": asdict(kid) if kid is not None else None,
    }


def similarity(generated: FeatureSet, reference: FeatureSet) -> float:
    """Return the mean cosine over all pairs of pictures, one of each set: CLIP-I and DINO of the DreamBooth paper."""
    return float(_mean_direction(generated) @ _mean_direction(reference))


def _mean_direction(features: FeatureSet) -> NDArray[np.float64]:
    rows = np.concatenate(list(features.features())).astype(np.float64)
    mean: NDArray[np.float64] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0)
    return mean


def loss_figures(spec: LossSpec, loss: "Validation") -> dict[str, Any]:
    """Return the entry of a checkpoint's loss."""
    return {
        "checkpoint": spec.checkpoint.uri,
        "run": run if (run := run_of(spec.checkpoint.uri)) != spec.checkpoint.uri else "",
        "weights": "ema" if spec.ema else "raw",
        "dataset": spec.dataset,
        "held_out_of_training": spec.settings.source is None,
        "mean": loss.mean,
        "standard_error": loss.error,
        "rows": loss.rows,
        "by_timestep": loss.by_timestep,
    }


def notes(figures: Mapping[str, Any], config: EvaluateConfig) -> list[str]:
    """Return remarks that a reader needs before comparing figures."""
    remarks = []
    if "fid" in figures:
        least = min(figures["fid"]["generated"], figures["fid"]["reference"])
        if least < _SMALL:
            remarks.append(
                f"FID of {least:,} pictures is biased upwards, more so the fewer there are: compare it only with sets "
                "of the same sizes; KID has no such bias"
            )
        if figures["fid_infinity"] is None and config.fid.infinity_points:
            remarks.append(f"no FID-infinity: it needs {LEAST_FOR_INFINITY:,} pictures")
    return remarks


def to_bytes(figures: Mapping[str, Any], config: EvaluateConfig) -> bytes:
    """Return the content of evaluation.json."""
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
