"""The figures of an evaluation, computed from features, and remarks on them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sdp
from sdp.config import EvaluateConfig
from sdp.evaluate.loss import LossSpec
from sdp.model.checkpoints import run_of

if TYPE_CHECKING:
    from sdp.evaluate.worker import UnitFeatures
    from sdp.train.validation import Validation

FORMAT = 1
_SUBSETS, _SUBSET = 100, 1000
"""KID's subsets and the pictures of each, as in its paper and in torch-fidelity."""
_SMALL = 10_000
"""FID of fewer pictures comes with a warning."""


@dataclass(frozen=True)
class SetFeatures:
    """The features of all pictures of a set, in the order of their addresses."""

    features: NDArray[np.float32]
    scores: NDArray[np.float64]
    """CLIP scores of the pictures that have a caption."""
    counts: Mapping[str, Any]
    """Pictures by outcome, and `reasons` of those that could not be used."""

    @staticmethod
    def of(units: "Iterable[UnitFeatures]") -> "SetFeatures":
        """Join the units of a set."""
        ordered = sorted(units, key=lambda unit: unit.unit)
        others = sum((unit.others for unit in ordered), Counter[tuple[str, str]]())
        outcomes: Counter[str] = Counter(written=sum(unit.written for unit in ordered), filtered=0, failed=0)
        for (outcome, _), count in others.items():
            outcomes[outcome] += count
        reasons = {reason: count for (_, reason), count in sorted(others.items())}
        features = [batch for unit in ordered for batch in unit.features] or [np.zeros((0, 0), np.float32)]
        scores = np.array([score for unit in ordered for score in unit.scores], np.float64)
        counts = {"input": outcomes.total(), **outcomes, "reasons": reasons}
        return SetFeatures(np.concatenate(features), scores, counts)


def clip_score(scores: NDArray[np.float64]) -> dict[str, Any]:
    """Return the CLIP score: the mean of 100 · cosine, with its standard error."""
    if not len(scores):
        return {"score": None, "pictures": 0}
    error = scores.std(ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else 0.0
    return {"score": float(scores.mean()), "standard_error": float(error), "pictures": len(scores)}


def distances(generated: SetFeatures, reference: SetFeatures) -> dict[str, Any]:
    """Return FID and KID as torch-fidelity computes them, in float64: they are small differences of large sums."""
    import torch
    from torch_fidelity import metric_fid, metric_kid

    sets = [torch.from_numpy(each.features).double() for each in (generated, reference)]
    statistics = [metric_fid.fid_features_to_statistics(features) for features in sets]
    fid = metric_fid.fid_statistics_to_metric(*statistics, verbose=False)[metric_fid.KEY_METRIC_FID]
    size = min(_SUBSET, *map(len, sets))
    kid = metric_kid.kid_features_to_metric(*sets, kid_subsets=_SUBSETS, kid_subset_size=size, verbose=False)
    mean, deviation = kid[metric_kid.KEY_METRIC_KID_MEAN], kid[metric_kid.KEY_METRIC_KID_STD]
    return {
        "fid": {"value": fid, "generated": len(sets[0]), "reference": len(sets[1])},
        "kid": {"mean": mean, "deviation": deviation, "subsets": _SUBSETS, "size": size},
    }


def similarity(generated: SetFeatures, reference: SetFeatures) -> float:
    """Return the mean cosine over all pairs of pictures, one of each set: CLIP-I and DINO of the DreamBooth paper."""
    return float(_mean_direction(generated) @ _mean_direction(reference))


def _mean_direction(each: SetFeatures) -> NDArray[np.float64]:
    rows = each.features.astype(np.float64)
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


def notes(figures: Mapping[str, Any]) -> list[str]:
    """Return remarks that a reader needs before comparing figures."""
    remarks = []
    if "fid" in figures:
        least = min(figures["fid"]["generated"], figures["fid"]["reference"])
        if least < _SMALL:
            remarks.append(
                f"FID of {least:,} pictures is biased upwards, more so the fewer there are: compare it only with sets "
                "of the same sizes; KID has no such bias"
            )
    return remarks


def to_bytes(figures: Mapping[str, Any], config: EvaluateConfig) -> bytes:
    """Return the content of evaluation.json."""
    data = {
        "format": FORMAT,
        "kind": "evaluation",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "sdp": sdp.__version__,
        **figures,
        "notes": notes(figures),
        "config": config.model_dump(mode="json"),
    }
    return (json.dumps(data, indent=1, default=str) + "\n").encode()
