"""What a checkpoint of a training run looks like to those who read it.

A folder with the tensors (`sharded`), under the names

    model.<parameter>, ema.<parameter>, exp_avg.<parameter>, exp_avg_sq.<parameter>

with ledger.roaring and config.json, and with complete.json, without which it is no checkpoint.
"""

import re
from typing import TYPE_CHECKING, Any

from sdp.datasets.output import read_json
from sdp.errors import DatasetError, NotFound
from sdp.storage import Storage, StorageOptions, open_storage

if TYPE_CHECKING:
    from torch import Tensor

COMPLETE, CONFIG = "complete.json", "config.json"
FOLDER = "checkpoints/"
FORMAT = 1
MODEL, EMA = "model.", "ema."

_STEP = re.compile(rf"^{FOLDER}step-(\d{{9,}})/")


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
    for phase in (run, run.child("phase-2"), run.child("phase-1")):
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
    if marker.get("format") != FORMAT:
        raise DatasetError(f"{folder.uri}: format {marker.get('format')}, this sdp reads {FORMAT}; use a newer sdp")
    return marker


def read_weights(folder: Storage, *, ema: bool) -> "dict[str, Tensor]":
    """The U-Net's weights, or their moving average, by the names of its parameters."""
    from sdp.model import sharded

    prefix = EMA if ema else MODEL
    names = [name for name in sharded.read_index(folder) if name.startswith(prefix)]
    if not names:
        raise DatasetError(f"{folder.uri}: no moving average in it (ema.decay was null); take the raw weights")
    return {name.removeprefix(prefix): tensor for name, tensor in sharded.read_tensors(folder, names).items()}
