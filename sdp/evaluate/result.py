"""The figures of an evaluation, computed from features, and remarks on them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sdp
from sdp.config.evaluate import EvaluateConfig
from sdp.datasets.outcomes import Counts

FORMAT = 1
_SUBSETS, _SUBSET = 100, 1000
"""KID's subsets and the pictures of each, as in its paper and in torch-fidelity."""
_SMALL = 10_000
"""FID of fewer pictures comes with a warning."""


@dataclass(frozen=True)
class Features:
    """The features of pictures, in the order of their addresses."""

    features: NDArray[np.float32]
    """A row for each picture that could be used."""
    scores: NDArray[np.float32]
    """CLIP scores of those that have a caption."""
    counts: Counts
    """All pictures by outcome."""

    @staticmethod
    def join(parts: "Sequence[Features]") -> "Features":
        """Return the features of several groups of pictures, one after another."""
        nothing = np.zeros((0, 0), np.float32)
        return Features(
            np.concatenate([part.features for part in parts if len(part.features)] or [nothing]),
            np.concatenate([part.scores for part in parts] or [nothing.ravel()]),
            sum((part.counts for part in parts), Counts()),
        )


def clip_score(scores: NDArray[np.float32]) -> dict[str, Any]:
    """Return the CLIP score: the mean of 100 · cosine, with its standard error."""
    if not len(scores):
        return {"score": None, "pictures": 0}
    error = scores.std(ddof=1, dtype=np.float64) / np.sqrt(len(scores)) if len(scores) > 1 else 0.0
    return {"score": float(scores.mean(dtype=np.float64)), "standard_error": float(error), "pictures": len(scores)}


def distances(generated: Features, reference: Features) -> dict[str, Any]:
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


def similarity(generated: Features, reference: Features) -> float:
    """Return the mean cosine over all pairs of pictures, one of each set: CLIP-I and DINO of the DreamBooth paper."""
    rows = [each.features.astype(np.float64) for each in (generated, reference)]
    first, second = ((each / np.linalg.norm(each, axis=1, keepdims=True)).mean(axis=0) for each in rows)
    return float(first @ second)


def notes(figures: Mapping[str, Any]) -> list[str]:
    """Return remarks that a reader needs before comparing figures."""
    if "fid" in figures and (least := min(figures["fid"]["generated"], figures["fid"]["reference"])) < _SMALL:
        return [
            f"FID of {least:,} pictures is biased upwards, more so the fewer there are: compare it only with sets of "
            "the same sizes; KID has no such bias"
        ]
    return []


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
