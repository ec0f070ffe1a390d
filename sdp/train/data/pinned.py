"""The version of each dataset that a run reads, pinned in the run's folder, so that all its workers read the same.

An epoch's order depends on the list of parts, and a dataset may grow during the epoch. A job that continues an epoch
reads the version that the epoch began with; a job that starts between two epochs reads the newest. The pinned manifest
is checked by its digest, so another dataset at the same URI is refused.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from sdp.config.train import TrainConfig
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.records import BadRecord, parse
from sdp.errors import DatasetError, NotFound
from sdp.storage import Storage, open_storage


@dataclass(frozen=True, slots=True)
class Pin:
    """A version of a dataset."""

    uri: str
    version: int
    digest: str
    """The manifest's digest."""


def open_pinned(
    config: TrainConfig,
    number: int,
    uri: str,
    kind: str,
    *,
    newest: bool = False,
    write: Callable[[], None] | None = None,
) -> Dataset:
    """Open the run's `number`-th dataset in the pinned version, or in the `newest`.

    If no version is pinned, the newest is opened. The driver pins it: `write` is the check of the run's lease.
    """
    options = config.storage.options()
    run, storage = open_storage(config.output.uri, options), open_storage(uri, options)
    pin = _read_pin(run, number)
    if pin is not None and (not newest or pin.uri != storage.uri):  # at another URI: moved, or another dataset
        pinned = _open_pin(pin, storage, kind)
        if not newest:
            return pinned
    dataset = open_dataset(storage, kind)
    if write is not None:
        pin = Pin(storage.uri, dataset.manifest.version, dataset.digest)
        run.publish_held(_name(number), json.dumps(asdict(pin), indent=1).encode(), write)
    return dataset


def _open_pin(pin: Pin, storage: Storage, kind: str) -> Dataset:
    try:
        dataset = open_dataset(storage, kind, version=pin.version)
    except NotFound:
        open_dataset(storage, kind)  # a folder without a dataset is refused as such
        raise _another(storage.uri, pin, "which no longer exists") from None
    if dataset.digest != pin.digest:
        raise _another(storage.uri, pin, f"manifest {pin.digest[:12]}…; now {dataset.digest[:12]}…")
    return dataset


def _another(uri: str, pin: Pin, what: str) -> DatasetError:
    where = f" of {pin.uri}" if pin.uri != uri else ""
    return DatasetError(
        f"{uri}: not the dataset that this run began with (version {pin.version}{where}, {what}); restore it, or "
        "choose another output.uri and set model.start_from to this run"
    )


def _name(number: int) -> str:
    return f"_source/{number:03d}.json"


def _read_pin(run: Storage, number: int) -> Pin | None:
    try:
        return parse(Pin, run.read(_name(number)))
    except NotFound:
        return None
    except BadRecord as error:
        raise DatasetError(
            f"{run.uri_of(_name(number))}: not the pinned version of a dataset ({error}); restore it, or delete it if "
            "the dataset has not changed since the run began"
        ) from error
