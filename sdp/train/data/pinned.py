"""Which version of each dataset a run reads: noted in the run's folder, so that all who read for it read the same.

An epoch's order follows from the list of parts, and a dataset may grow meanwhile: parts come, rows are rescued. A job
that goes on with an epoch reads the version that the epoch was begun with; one that starts between two epochs takes
what is there then. What was noted is checked by its digest, so another dataset at the same address is refused.
"""

import json
from dataclasses import asdict, dataclass

from sdp.config import TrainConfig
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.storage import Storage, open_storage


@dataclass(frozen=True, slots=True)
class Pin:
    """A version of a dataset."""

    uri: str
    version: int
    digest: str
    """Of its manifest."""

    @staticmethod
    def of(dataset: Dataset) -> "Pin":
        return Pin(dataset.storage.uri, dataset.manifest.version, dataset.digest)


def open_pinned(
    config: TrainConfig, number: int, uri: str, kind: str, *, newest: bool = False, write: bool = False
) -> Dataset:
    """The run's `number`-th dataset in the version that is noted; in the `newest`, if asked for or if none is noted.

    With `write` what was opened is noted from now on.
    """
    options = config.storage.options()
    run, storage = open_storage(config.output.uri, options), open_storage(uri, options)
    noted = _noted(run, number)
    if noted is not None and (not newest or noted.uri != storage.uri):  # elsewhere: moved, or another dataset
        pinned = _as_noted(noted, storage, kind)
        if not newest:
            return pinned
    dataset = open_dataset(storage, kind)
    if write:
        pin = json.dumps(asdict(Pin.of(dataset)), indent=1).encode()
        if newest:
            run.publish(_name(number), pin)
        else:
            try:
                run.create(_name(number), pin)
            except AlreadyExists:  # another worker was first
                return open_pinned(config, number, uri, kind)
    return dataset


def outgrown(dataset: Dataset) -> str | None:
    """A line for who wonders where the newest rows are: they are not read yet."""
    there = open_dataset(dataset.storage).manifest
    if there.version == dataset.manifest.version:
        return None
    return (
        f"{dataset.storage.uri}: version {there.version} is there; this epoch goes on with version "
        f"{dataset.manifest.version}, which it began with; a job that starts between epochs takes the newest"
    )


def _as_noted(pin: Pin, storage: Storage, kind: str) -> Dataset:
    try:
        dataset = open_dataset(storage, kind, version=pin.version)
    except NotFound:
        open_dataset(storage, kind)  # a folder without a dataset is refused as such
        raise _another(storage.uri, pin, "which is gone") from None
    if dataset.digest != pin.digest:
        raise _another(storage.uri, pin, f"manifest {pin.digest[:12]}…; now {dataset.digest[:12]}…")
    return dataset


def _another(uri: str, pin: Pin, what: str) -> DatasetError:
    where = f" of {pin.uri}" if pin.uri != uri else ""
    return DatasetError(
        f"{uri}: not the dataset that this run was begun with (version {pin.version}{where}, {what}); restore it, or "
        "choose another output.uri and begin from this run's weights by model.start_from"
    )


def _name(number: int) -> str:
    return f"_source/{number:03d}.json"


def _noted(run: Storage, number: int) -> Pin | None:
    try:
        raw = run.read(_name(number))
    except NotFound:
        return None
    try:
        data = json.loads(raw)
        return Pin(str(data["uri"]), int(data["version"]), str(data["digest"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{run.uri_of(_name(number))}: not a note of a dataset's version ({error}); restore it, or delete it if "
            "the dataset has not changed since the run began"
        ) from error
