"""What a checkpoint of a training run looks like to those who read it.

A folder with the tensors (`sharded`), under the names

    model.<parameter>, ema.<parameter>, exp_avg.<parameter>, exp_avg_sq.<parameter>

(with adamw_8bit exp_avg_codes and exp_avg_scales in place of exp_avg), with ledger.roaring and config.json, and with
complete.json, without which it is no checkpoint.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sdp.datasets.ledger import NAME as LEDGER
from sdp.datasets.ledger import Ledger
from sdp.datasets.output import read_json
from sdp.datasets.records import BadRecord, Whole, parse
from sdp.errors import DatasetError, NotFound
from sdp.model.damage import DamagedCheckpoint
from sdp.model.tensor_index import read_tensor_index
from sdp.storage import Storage, StorageOptions, open_storage

if TYPE_CHECKING:
    from torch import Tensor

COMPLETE, CONFIG = "complete.json", "config.json"
FOLDER = "checkpoints/"
FORMAT = 1
MODEL, EMA = "model.", "ema."

PHASES = ("phase-1", "phase-2")
"""The folders of a run of two phases, each a run of its own."""
_STEP = re.compile(rf"^{FOLDER}step-(\d{{9,}})/")


@dataclass(frozen=True, slots=True)
class StateCounts:
    """The whole numbers of a run's state."""

    step: Whole
    taken: Whole = 0
    empty: Whole = 0
    samples: Whole = 0
    skipped_samples: Whole = 0
    counted_in_epoch: Whole = 0
    epoch: Whole = 0
    position: Whole = 0
    optimized: Whole = 0
    averaged: Whole = 0
    scale_growth: Whole = 0


Place = tuple[Whole, Whole, Whole]
"""Where a dataset is: the number of its pass, the rows that this pass has had, and the rows of the dataset."""


@dataclass(frozen=True, slots=True)
class EpochStart:
    """What an epoch began with and does not follow from its number: whoever goes on with it needs the same."""

    places: tuple[Place, ...] = ()
    """Where each of several datasets was; nothing of one alone."""
    lanes: Whole = 0
    """Sequences that its order reads side by side; 0 where only the configuration says."""
    phase: Whole = 0
    """Runs that came before this one and handed their weights on."""


FIRST = EpochStart()


@dataclass(frozen=True, slots=True)
class _Marker:
    """What every reader of a checkpoint relies on."""

    format: Annotated[int, Field(ge=FORMAT)]
    state: StateCounts
    created: datetime | None = None
    epoch_start: EpochStart = FIRST


@dataclass(frozen=True, slots=True)
class _Numbers:
    state: Mapping[str, float | None]


def checkpoint_name(step: int) -> str:
    """Where the checkpoint of a step lies in its run."""
    return f"{FOLDER}step-{step:09d}"


def steps_in(run: Storage) -> dict[int, bool]:
    """The steps that have a folder in a run, in order, and whether their checkpoint is complete."""
    found: dict[int, bool] = {}
    for name in run.names(FOLDER):
        if match := _STEP.match(name):
            step = int(match[1])
            found[step] = found.get(step, False) or name == f"{checkpoint_name(step)}/{COMPLETE}"
    return dict(sorted(found.items()))


def find_checkpoint(uri: str, options: StorageOptions | None = None) -> Storage:
    """A complete checkpoint by its URI; of a run (or `RUN/checkpoints/latest`) the newest, of its last phase if it has
    several."""
    folder = open_storage(uri, options)
    if folder.exists(COMPLETE):
        return folder
    run = open_storage(re.sub(r"/checkpoints(/latest)?$", "", folder.uri), options)
    for phase in (run, *map(run.child, reversed(PHASES))):
        complete = [step for step, whole in steps_in(phase).items() if whole]
        if complete:
            return phase.child(checkpoint_name(complete[-1]))
    raise DatasetError(f"{uri}: no complete checkpoint there (no {COMPLETE}); check the address")


def read_marker(folder: Storage) -> dict[str, Any]:
    """What a complete checkpoint says of itself."""
    try:
        marker = read_json(folder, COMPLETE)
    except NotFound:
        raise DatasetError(f"{folder.uri}: no complete checkpoint there (no {COMPLETE}); check the address") from None
    except DatasetError as error:
        raise DamagedCheckpoint(str(error).partition(";")[0]) from error
    if isinstance(number := marker.get("format"), int) and number > FORMAT:
        raise DatasetError(f"{folder.uri}: format {number}, this sdp reads {FORMAT}; use a newer sdp")
    try:
        parse(_Marker, marker)
        parse(_Numbers, marker)
    except BadRecord as error:
        raise DamagedCheckpoint(f"{folder.uri_of(COMPLETE)}: {error}") from error
    return marker


def read_epoch_start(marker: Mapping[str, Any]) -> EpochStart:
    """Return what the epoch under way began with, from a checkpoint's marker."""
    return parse(EpochStart, marker.get("epoch_start", {}))


def read_ledger(folder: Storage) -> Ledger:
    """Return the addresses that a checkpoint has consumed."""
    try:
        return Ledger.from_bytes(folder.read(LEDGER), folder.uri_of(LEDGER))
    except NotFound as error:
        raise DamagedCheckpoint(f"{folder.uri_of(LEDGER)}: missing") from error
    except DatasetError as error:
        raise DamagedCheckpoint(str(error).partition(";")[0]) from error


def way_out(folder: Storage) -> str:
    """What to do where this checkpoint, its run's newest, is damaged."""
    uri, _, name = folder.uri.rpartition(f"/{FOLDER}")
    match = _STEP.match(f"{FOLDER}{name}/")
    if not uri or match is None:
        return "use another checkpoint"
    steps = steps_in(open_storage(uri, folder.options))
    before = [step for step, whole in steps.items() if whole and step < int(match[1])]
    return f"delete {folder.uri} to " + (f"go on from step {before[-1]:,}" if before else "begin anew")


def read_weights(folder: Storage, *, ema: bool) -> "dict[str, Tensor]":
    """Return the weights that were trained, or their moving average, by their names without the prefix."""
    from sdp.model import sharded

    prefix = EMA if ema else MODEL
    names = [name for name in read_tensor_index(folder).tensors if name.startswith(prefix)]
    if not names:
        raise DatasetError(f"{folder.uri}: no moving average in it (ema.decay was null); take the raw weights")
    return {name.removeprefix(prefix): tensor for name, tensor in sharded.read_tensors(folder, names).items()}
