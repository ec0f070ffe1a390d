"""An evaluation's files: their names, what they are about, and their figures. Without torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from sdp.console import counted
from sdp.datasets.output import read_json
from sdp.datasets.records import reading
from sdp.storage import Storage

GENERATED, REFERENCE = "generated", "reference"
RESULT = "evaluation.json"


def evaluated(evaluation: Storage) -> str | None:
    """Return the URI of the pictures that an evaluation is about."""
    result = read_json(evaluation, RESULT)
    with reading(evaluation.uri_of(RESULT), "evaluate again"):
        uri = result.get("generated", {}).get("uri")
        return None if uri is None else str(uri)


def headlines(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each figure's name, its value (empty if it has none), and an explanation."""
    if clip := result.get("clip"):
        if clip["score"] is None:
            yield "CLIP score", "", "no picture has a caption"
        else:
            yield "CLIP score", _plus(clip["score"], clip["standard_error"], 2), counted(clip["pictures"], "picture")
    if fid := result.get("fid"):
        sizes = f"{counted(fid['generated'], 'picture')} against {fid['reference']:,}"
        yield "FID", f"{fid['value']:.3f}", sizes
    if kid := result.get("kid"):
        yield "KID", _plus(kid["mean"], kid["deviation"], 6), f"{kid['subsets']} subsets of {kid['size']:,}"
    if (cosine := result.get("similarity")) is not None:
        yield "similarity", f"{cosine:.4f}", "mean cosine between the features of both sets"


def _plus(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"
