"""Names of an evaluation's files, and the pictures or the run that it is about. Without torch."""

from dataclasses import dataclass

from sdp.datasets.output import read_json
from sdp.datasets.records import BadRecord, parse
from sdp.errors import DatasetError
from sdp.storage import Storage

KIND = "features"
"""Kind of the datasets in GENERATED and REFERENCE, with a row of features for each picture."""
GENERATED, REFERENCE = "generated", "reference"
RESULT = "evaluation.json"
FEATURES, CLIP = "features", "clip"
"""Columns: the network's features of a picture, and its CLIP score."""


@dataclass(frozen=True, slots=True)
class _Subject:
    uri: str | None = None
    run: str | None = None


@dataclass(frozen=True, slots=True)
class _Result:
    generated: _Subject | None = None
    loss: _Subject | None = None


def evaluated(evaluation: Storage) -> str | None:
    """Return the URI of the pictures, or else of the run, that an evaluation is about."""
    try:
        result = parse(_Result, read_json(evaluation, RESULT))
    except BadRecord as error:
        raise DatasetError(f"{evaluation.uri_of(RESULT)}: {error}; evaluate again") from error
    for uri in (result.generated.uri if result.generated else None, result.loss.run if result.loss else None):
        if uri is not None:
            return uri
    return None
