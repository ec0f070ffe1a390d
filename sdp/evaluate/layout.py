"""The files of an evaluation: their names, and which pictures or run it is about. Needs no torch."""

from sdp.datasets.fields import BadField, Fields
from sdp.datasets.output import read_json
from sdp.errors import DatasetError
from sdp.storage import Storage

KIND = "features"
"""Of the datasets in GENERATED and REFERENCE: a row for each picture that was looked at."""
GENERATED, REFERENCE = "generated", "reference"
RESULT = "evaluation.json"
FEATURES, CLIP = "features", "clip"
"""Columns: the network's features of a picture, and its CLIP score."""


def evaluated(evaluation: Storage) -> str | None:
    """Return the URI of the pictures, or else of the run, that an evaluation is about."""
    try:
        result = Fields(read_json(evaluation, RESULT))
        for name, key in (("generated", "uri"), ("loss", "run")):
            if result.has(name) and result.inner(name).has(key):
                return result.inner(name).text(key)
    except BadField as error:
        raise DatasetError(f"{evaluation.uri_of(RESULT)}: {error}; evaluate again") from error
    return None
