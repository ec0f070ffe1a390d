"""The layout of a training run's checkpoints, and how to read them.

A checkpoint is a folder with the tensors (`sharded`), under the names

    model.<parameter>, ema.<parameter>, exp_avg.<parameter>, exp_avg_sq.<parameter>

with ledger.roaring, config.json and the marker complete.json. Without the marker it is incomplete.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sdp.config.load import parse_into
from sdp.config.train import PHASES, TrainConfig
from sdp.datasets.ledger import NAME as LEDGER
from sdp.datasets.ledger import Ledger
from sdp.datasets.output import read_json
from sdp.datasets.records import BadRecord, Whole, parse
from sdp.errors import ConfigError, DatasetError, NotFound, SdpError, UserError
from sdp.model.tensor_index import DamagedCheckpoint, read_tensor_index
from sdp.storage import Storage, StorageOptions, open_storage

if TYPE_CHECKING:
    from torch import Tensor

COMPLETE, CONFIG = "complete.json", "config.json"
FOLDER = "checkpoints/"
FORMAT = 1
MODEL, EMA = "model.", "ema."

_STEP = re.compile(rf"^{FOLDER}step-(\d{{9,}})/")
NEWEST, NAMED = re.compile(r"/checkpoints(/latest)?$"), re.compile(r"/checkpoints/step-\d+$")
"""The ends of URIs that mean a run's newest checkpoint, and one by its name."""
STEP = "{step}"
"""Stands in the URI of an output for the step of the checkpoint that it is made with."""


DatasetPosition = tuple[Whole, Whole, Whole]
"""The position in a dataset: the number of the pass, the rows taken in this pass, and the dataset's rows."""


@dataclass(frozen=True, slots=True)
class EpochStart:
    """The conditions at the start of an epoch that do not follow from its number. Resuming needs the same ones."""

    places: tuple[DatasetPosition, ...] = ()
    """The position in each dataset of a mixture; empty for a single dataset."""
    lanes: Whole = 0
    """Lanes of the epoch's order; 0 if the configuration decides."""
    phase: Whole = 0
    """Number of earlier runs, each of which started the next from its weights."""


FIRST = EpochStart()


@dataclass(slots=True)
class TrainState:
    """The state of a run: all that a resumed run needs besides tensors and the ledger, counted since it began."""

    step: Whole
    """Finished steps, skipped ones included; max_steps and the learning rate count these."""
    taken: Whole = 0
    """Steps that changed the weights."""
    empty: Whole = 0
    """Steps without a row that counts, which change nothing."""
    samples: Whole = 0
    """Samples trained on."""
    skipped_samples: Whole = 0
    """Samples of bad steps, which are consumed as well."""
    counted_in_epoch: Whole = 0
    """Samples of the current epoch, trained on or skipped."""
    epoch: Whole = 0
    """The current epoch, from 0."""
    position: Whole = 0
    """Consumed positions of the epoch's order."""
    start: EpochStart = FIRST
    """The beginning of the current epoch."""
    seconds: float = 0.0
    """Time spent training."""
    gpu_hours: float = 0.0
    """GPU-hours of trainers and encoders during that time."""
    trainer_hours: float = 0.0
    """Hours of all trainers."""
    encoder_hours: float = 0.0
    """Hours of all encoders, in online mode."""
    averaged: Whole = 0
    """Steps in the moving average, with those of the run that it was taken from."""
    loss: float | None = None
    """The smoothed loss."""

    @property
    def skipped(self) -> int:
        """Steps that were bad and therefore skipped."""
        return self.step - self.taken - self.empty

    @property
    def consumed(self) -> int:
        """Samples in the ledger."""
        return self.samples + self.skipped_samples

    def count(self, samples: int, *, taken: bool) -> None:
        """Count the samples of a step."""
        if taken:
            self.samples += samples
        else:
            self.skipped_samples += samples
        self.counted_in_epoch += samples
        if not samples:
            self.empty += 1

    def smooth(self, loss: float) -> None:
        """Add a step's loss to the smoothed loss: a moving average over the last tenth of the steps, or 100 of them."""
        if self.loss is None:
            self.loss = loss
        else:  # a mean of all steps would carry the high losses of the first ones
            self.loss += (loss - self.loss) * max(0.01, 10 / (max(1, self.taken) + 9))

    def bill(self, seconds: float, *, trainers: int = 0, encoders: int = 0, gpu: bool) -> None:
        """Count the hours of those who worked in a step, each with a GPU or without."""
        hours = seconds / 3600
        self.gpu_hours += hours * (trainers + encoders) * gpu
        self.trainer_hours += hours * trainers
        self.encoder_hours += hours * encoders

    def cost(self, prices: Mapping[str, Any]) -> float:
        """Return the cost of the hours so far, by the section `prices` of a configuration."""
        trainer, encoder = (prices.get(name) or 0.0 for name in ("trainer_hour", "encoder_hour"))
        return self.trainer_hours * trainer + self.encoder_hours * encoder

    def to_json(self) -> dict[str, Any]:
        """Return the counts, without the epoch's start."""
        return {name: value for name, value in asdict(self).items() if name != "start"}


@dataclass(frozen=True, slots=True)
class _Marker:
    """The fields of complete.json that every reader needs."""

    format: Annotated[int, Field(ge=FORMAT)]
    state: TrainState
    created: datetime | None = None
    workers: Whole = 0
    epoch_start: EpochStart = FIRST
    epoch_rows: Whole = 0
    granule: Whole = 0
    model: Mapping[str, str | None] = field(default_factory=dict)
    dataset: Mapping[str, Any] = field(default_factory=dict)
    datasets: tuple[Mapping[str, Any], ...] = ()


def checkpoint_name(step: int) -> str:
    """Return the folder of a step's checkpoint within its run."""
    return f"{FOLDER}step-{step:09d}"


class Steps(dict[int, bool]):
    """The steps that have a checkpoint folder in a run, in order, and whether the checkpoint is complete."""

    @property
    def complete(self) -> list[int]:
        return [step for step, is_complete in self.items() if is_complete]


def steps_in(run: Storage) -> Steps:
    """Return the steps of a run."""
    files: dict[int, set[str]] = {}
    for name in run.names(FOLDER):
        if match := _STEP.match(name):
            files.setdefault(int(match[1]), set()).add(name[match.end() :])
    return Steps((step, _is_complete(files[step])) for step in sorted(files))


def is_checkpoint(folder: Storage) -> bool:
    """Return whether a folder is a complete checkpoint."""
    return folder.exists(COMPLETE) and _is_complete(folder.names())


def _is_complete(files: Collection[str]) -> bool:
    """Return whether these are a complete checkpoint's files.

    A marker alone does not count: a job that was suspended has written it after another one had deleted the checkpoint.
    """
    return COMPLETE in files and len(files) > 1


def run_of(uri: str) -> str:
    """Return the URI of the run that a checkpoint (or a file in it) belongs to; any other URI is returned unchanged."""
    return re.sub(r"/checkpoints(/.*)?$", "", uri)


def find_checkpoint(uri: str, options: StorageOptions | None = None) -> Storage:
    """Return a complete checkpoint by its URI.

    For a run (or `RUN/checkpoints/latest`) it is the newest one, of the last phase in a two-phase run.
    """
    folder = open_storage(uri, options)
    if is_checkpoint(folder):
        return folder
    run = open_storage(NEWEST.sub("", folder.uri), options)
    for phase in (run, *map(run.child, reversed(PHASES))):
        if complete := steps_in(phase).complete:
            return phase.child(checkpoint_name(complete[-1]))
    raise DatasetError(f"{uri}: no complete checkpoint there (no {COMPLETE}, or nothing beside it); check the URI")


def newer_than(uri: str, options: StorageOptions | None = None) -> str:
    """Return the name of a run's newest checkpoint if it is newer than this one; "" if not, or if it cannot be read."""
    try:
        newest = find_checkpoint(run_of(uri), options).uri.rpartition("/")[2] if run_of(uri) != uri else ""
    except SdpError:
        return ""
    return newest if newest > uri.rpartition("/")[2] else ""


def with_step(uri: str, checkpoint: str) -> str:
    """Return the URI of an output with the step of a checkpoint in place of {step}."""
    name = checkpoint.rpartition("/")[2]
    return uri.replace(STEP, name.removeprefix("step-").lstrip("0") or name)


def read_marker(folder: Storage) -> dict[str, Any]:
    """Return the content of a checkpoint's complete.json; raise DatasetError if it is missing or invalid."""
    try:
        marker = read_json(folder, COMPLETE)
    except NotFound:
        raise DatasetError(f"{folder.uri}: no complete checkpoint there (no {COMPLETE}); check the URI") from None
    except DatasetError as error:
        raise DamagedCheckpoint(str(error).partition(";")[0]) from error
    if isinstance(number := marker.get("format"), int) and number > FORMAT:
        raise DatasetError(f"{folder.uri}: format {number}, this sdp reads {FORMAT}; use a newer sdp")
    try:
        parse(_Marker, marker)
    except BadRecord as error:
        raise DamagedCheckpoint(f"{folder.uri_of(COMPLETE)}: {error}") from error
    return marker


def read_config(folder: Storage) -> dict[str, Any]:
    """Return the configuration of a checkpoint's run."""
    try:
        return read_json(folder, CONFIG)
    except NotFound as error:
        raise DatasetError(f"{folder.uri}: no {CONFIG}; use another checkpoint") from error


def training_config(folder: Storage) -> TrainConfig:
    """Return the configuration of a checkpoint's run as this version's."""
    try:
        return parse_into(TrainConfig, read_config(folder))
    except ConfigError as error:
        raise DatasetError(
            f"{folder.uri}: its {CONFIG} is not one of this version of sdp ({error.problems[0]}); use another "
            "checkpoint, or the version that wrote it"
        ) from error


def base_digest(folder: Storage) -> str | None:
    """Return the digest of the model that a checkpoint's run started from."""
    digest: str | None = read_marker(folder).get("model", {}).get("digest")
    return digest


def averages(training: TrainConfig, weights: str, folder: Storage) -> bool:
    """Return whether the setting `weights` (auto, ema or raw) means the moving average of a run's checkpoint."""
    if weights == "ema" and training.ema.decay is None:
        raise UserError(
            f"weights: expected raw or auto, got 'ema': {folder.uri} has no moving average (ema.decay was null)"
        )
    return training.ema.decay is not None and weights != "raw"


def state_in(marker: Mapping[str, Any]) -> TrainState:
    """Return the run's state, from a checkpoint's marker."""
    return parse(TrainState, {**marker["state"], "start": marker.get("epoch_start", {})})


def read_state(folder: Storage) -> TrainState:
    """Return the run's state at a checkpoint."""
    try:
        return state_in(read_marker(folder))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(error.what, remedy(folder)) from error


def trained_scheduler(prediction: str, zero_terminal_snr: bool) -> dict[str, Any]:
    """Return the settings of diffusers' samplers that follow from a training's objective."""
    if prediction == "flow":
        return {}
    settings: dict[str, Any] = {"prediction_type": "v_prediction" if prediction == "v" else "epsilon"}
    if zero_terminal_snr:  # the last timestep, which is pure noise, must be sampled
        settings |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return settings


def read_ledger(folder: Storage) -> Ledger:
    """Return the addresses that a checkpoint has consumed."""
    try:
        return Ledger.from_bytes(folder.read(LEDGER), folder.uri_of(LEDGER))
    except NotFound as error:
        raise DamagedCheckpoint(f"{folder.uri_of(LEDGER)}: missing") from error
    except DatasetError as error:
        raise DamagedCheckpoint(str(error).partition(";")[0]) from error


def remedy(folder: Storage) -> str:
    """Return the remedy if this checkpoint, the newest of its run, is damaged."""
    run, _, name = folder.uri.rpartition(f"/{FOLDER}")
    match = _STEP.match(f"{FOLDER}{name}/")
    if not run or match is None:
        return "use another checkpoint"
    steps = steps_in(open_storage(run, folder.options)).complete
    earlier = [step for step in steps if step < int(match[1])]
    return f"delete {folder.uri} to " + (f"go on from step {earlier[-1]:,}" if earlier else "begin anew")


def read_weights(folder: Storage, *, ema: bool) -> "dict[str, Tensor]":
    """Return the trained weights, or their moving average, by name without the prefix."""
    from sdp.model import sharded

    prefix = EMA if ema else MODEL
    names = [name for name in read_tensor_index(folder).tensors if name.startswith(prefix)]
    if not names:
        raise DatasetError(f"{folder.uri}: no moving average in it (ema.decay was null); use the raw weights")
    return {name.removeprefix(prefix): tensor for name, tensor in sharded.read_tensors(folder, names).items()}
