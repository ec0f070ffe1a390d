"""Identifies what is at a URI: a dataset, a run, a checkpoint or an evaluation."""

import re
from typing import Literal

from sdp.datasets.audit import RUN
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.output import HEAD
from sdp.errors import DatasetError
from sdp.evaluate.layout import RESULT
from sdp.model.checkpoints import COMPLETE, PHASES, find_checkpoint
from sdp.storage import Storage

Kind = Literal["checkpoint", "run", "evaluation", "dataset", "files"]

_MARKERS: dict[str, Kind] = {COMPLETE: "checkpoint", RUN: "run", RESULT: "evaluation", HEAD: "dataset"}
_CHECKPOINT = re.compile(r"/checkpoints/step-\d+$")
_NEWEST = re.compile(r"/checkpoints(/latest)?$")
_FOLDERS, _FILES = 100, 20_000
"""Limits on the folders and files that are listed if a URI is none of these."""


def kind_of(storage: Storage) -> Kind | None:
    """Return the kind of a folder by its marker file, or None."""
    return next(
        (kind for name, kind in _MARKERS.items() if storage.exists(name)), "run" if phases_of(storage) else None
    )


def phases_of(storage: Storage) -> list[Storage]:
    """Return the phases of a two-phase run."""
    return [phase for phase in map(storage.child, PHASES) if phase.exists(RUN)]


def identify(storage: Storage) -> tuple[Kind, Storage]:
    """Return the kind and folder of a URI: `RUN/checkpoints/latest` becomes a checkpoint's folder.

    A URI with datasets below it is refused with their names. One without Parquet files is refused too.
    """
    if kind := kind_of(storage):
        return kind, storage
    if _NEWEST.search(storage.uri):
        return "checkpoint", find_checkpoint(storage.uri, storage.options)
    if _CHECKPOINT.search(storage.uri) and storage.names(limit=1):
        raise DatasetError(f"{storage.uri}: no {COMPLETE}: incomplete, or still being written; use another checkpoint")
    folders = storage.folders()[:_FOLDERS]
    kinds = list(ordered_map(lambda name: kind_of(storage.child(name)), folders, workers=16))
    if below := [name for name, kind in zip(folders, kinds, strict=True) if kind]:
        raise DatasetError(f"{storage.uri}: no dataset here, but in {', '.join(below)}; pass one of these")
    names = storage.names(limit=_FILES)
    if names and not any(name.endswith(".parquet") for name in names):
        limit = f" among the first {_FILES:,} files" if len(names) == _FILES else ""
        raise DatasetError(
            f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}), and no Parquet file{limit}; "
            "check the URI"
        )
    return "files", storage
