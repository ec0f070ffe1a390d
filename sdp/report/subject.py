"""What lies at an address: the one place that tells datasets, runs, checkpoints and evaluations apart."""

import re
from typing import Literal

from sdp.datasets.audit import RUN
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.output import HEAD
from sdp.errors import DatasetError
from sdp.evaluate.layout import RESULT
from sdp.model.checkpoints import COMPLETE, PHASES, find_checkpoint
from sdp.storage import Storage, StorageOptions

Kind = Literal["checkpoint", "run", "evaluation", "dataset", "files"]

_MARKERS: dict[str, Kind] = {COMPLETE: "checkpoint", RUN: "run", RESULT: "evaluation", HEAD: "dataset"}
_CHECKPOINT = re.compile(r"/checkpoints/step-\d+$")
_NEWEST = re.compile(r"/checkpoints(/latest)?$")
_FOLDERS, _FILES = 100, 20_000
"""How many are looked at, at most, where the address itself is nothing of sdp."""


def kind_of(storage: Storage) -> Kind | None:
    """Return what a folder is by the file that marks it."""
    return next(
        (kind for name, kind in _MARKERS.items() if storage.exists(name)), "run" if phases_of(storage) else None
    )


def phases_of(storage: Storage) -> list[Storage]:
    """Return the runs of a run of two phases."""
    return [phase for phase in map(storage.child, PHASES) if phase.exists(RUN)]


def identify(storage: Storage, options: StorageOptions | None = None) -> tuple[Kind, Storage]:
    """Return what an address means, and where it lies: `RUN/checkpoints/latest` is a checkpoint's folder.

    A folder of sdp's datasets is refused with their names, and one without any Parquet file after a bounded look.
    """
    if kind := kind_of(storage):
        return kind, storage
    if _NEWEST.search(storage.uri):
        return "checkpoint", find_checkpoint(storage.uri, options)
    if _CHECKPOINT.search(storage.uri) and storage.names(limit=1):
        raise DatasetError(f"{storage.uri}: no {COMPLETE} in it: it is being written, or was left off; take another")
    folders = storage.folders()[:_FOLDERS]
    kinds = list(ordered_map(lambda name: kind_of(storage.child(name)), folders, workers=16))
    if below := [name for name, kind in zip(folders, kinds, strict=True) if kind]:
        raise DatasetError(f"{storage.uri}: no dataset here; below it: {', '.join(below)}; name one of them")
    names = storage.names(limit=_FILES)
    if names and not any(name.endswith(".parquet") for name in names):
        looked = f" among the first {_FILES:,} files" if len(names) == _FILES else ""
        raise DatasetError(
            f"{storage.uri}: neither a dataset of sdp (no {HEAD}) nor a run (no {RUN}), and no Parquet file{looked}; "
            "check the address"
        )
    return "files", storage
