"""Names of an evaluation's files, and the pictures or the run that it is about. Without torch."""

from sdp.datasets.output import read_json
from sdp.datasets.records import reading
from sdp.storage import Storage

KIND = "features"
"""Kind of the datasets in GENERATED and REFERENCE, with a row of features for each picture."""
GENERATED, REFERENCE = "generated", "reference"
RESULT = "evaluation.json"
FEATURES, CLIP = "features", "clip"
"""Columns: the network's features of a picture, and its CLIP score."""


def evaluated(evaluation: Storage) -> str | None:
    """Return the URI of the pictures, or else of the run, that an evaluation is about."""
    result = read_json(evaluation, RESULT)
    with reading(evaluation.uri_of(RESULT), "evaluate again"):
        uri = result.get("generated", {}).get("uri") or result.get("loss", {}).get("run")
        return None if uri is None else str(uri)
