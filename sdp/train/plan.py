"""The plan of a run, made and checked before any resource is taken."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdp.config.train import TrainConfig
from sdp.console import counted
from sdp.datasets import tombstones
from sdp.datasets.draws import held_out
from sdp.datasets.inspect import accounts
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN
from sdp.errors import ConfigError, DatasetError, Problem
from sdp.families import DENOISER
from sdp.model import sources
from sdp.model.checkpoints import EpochStart, TrainState, find_checkpoint, read_config, read_marker, read_state
from sdp.model.layout import ModelSource
from sdp.plan.memory import fit
from sdp.sources.joined import contents_of
from sdp.sources.reading import Columns
from sdp.storage import Storage, open_storage
from sdp.train.data.columns import TEXT
from sdp.train.data.images import open_columns
from sdp.train.data.latents import LatentsDataset, open_latents, refuse_another_encoder, refuse_embeddings
from sdp.train.data.order import Shuffle
from sdp.train.data.pinned import open_pinned
from sdp.train.data.sources import open_sources
from sdp.train.limits import last_step, reached_limit, used_up_budget
from sdp.train.run_folder import RunFolder

PARTS = (DENOISER, "text_encoder", "tokenizer", "scheduler")
"""The parts of the model that training needs."""
TUNABLE = ("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.clip_norm")
"""Keys that affect training and may change between jobs; the run's events record the change."""


_COUNTED = 100_000
"""The largest dataset whose rows are counted one by one, which reads all footers."""


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """The state of a run before a job begins or continues it."""

    run: str
    rows: int
    """Rows of an epoch."""
    positions: int
    """Positions of an epoch: its rows, and the padding of each shape's last batches if crops have several."""
    batch: int
    """Samples of a step, over all workers; the maximum if their number is elastic."""
    state: TrainState
    checkpoint: str | None
    """The checkpoint to continue from."""
    last_step: int | None
    """The step at which the run ends, if max_steps or max_epochs tells."""
    finished: str | None
    """The reason why the run is over, if it is."""
    tight: str | None = None
    """A line if GPU memory may not suffice."""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys that affect training and differ from the checkpoint, each with its old and new value."""
    columns: Columns | None = None
    """The images' columns, if images are encoded during training."""
    taken_down: int = 0
    """Addresses on the takedown lists of the source and of what it was made from."""
    used: Mapping[str, int] | None = None
    """Rows to train on, held out and otherwise left out, if there are few enough to count."""

    @property
    def identity(self) -> dict[str, Any]:
        """Keys of the run's identity that the configuration alone does not decide: the content of its tables."""
        contents = contents_of(self.columns.tables) if self.columns else []
        return {"source.tables": contents} if contents else {}

    def lines(self) -> list[str]:
        """Return the plan as lines for the terminal."""
        if self.finished is not None:
            limit, _, words = self.finished.partition(": ")
            steps = f"done at step {self.state.step:,}"
            if words:
                steps += f", since {limit} is {words}"
        else:
            steps = f"from step {self.state.step:,}" if self.checkpoint else "from the beginning"
            steps += f" to step {self.last_step:,}" if self.last_step is not None else " to the end of the last epoch"
        rows = counted(self.rows, "row")
        if self.columns is not None and self.columns.leave_out:
            rows += " before filters"
        if self.taken_down:
            rows += f" ({self.taken_down:,} taken down)"
        if self.used is not None:
            trained, *others = self.used.items()
            rows = ", ".join([f"{counted(trained[1], 'row')} to train on", *(f"{n:,} {why}" for why, n in others if n)])
        return [
            f"train: {rows}, {self.batch:,} per step, {counted(-(-self.positions // self.batch), 'step')} per epoch",
            f"train: {self.run}, {steps}",
            *([f"train: {self.tight}"] if self.tight else []),
            *(f"train: {key} changes from {was} to {now}" for key, (was, now) in self.changed.items()),
        ]


def make_plan(config: TrainConfig, *, begun: bool = True) -> TrainPlan:
    """Check all that can be wrong, the cheapest first, and return the plan.

    A later phase, which has not `begun`, cannot be checked against the run that it starts from.
    """
    options = config.storage.options()
    pretrained = config.model.denoiser == "pretrained"
    model = sources.check(config.model.source, _needed(config), storage=options, pretrained=pretrained)
    if config.lora.rank is not None:
        from sdp.model.trained import refuse_lora  # brings torch

        refuse_lora(config.lora, model, options, text_encoder=config.model.train_text_encoder)
    if config.model.start_from is not None and begun:
        _refuse_other_networks(config, find_checkpoint(config.model.start_from, options))
    run = RunFolder.of(config)
    checkpoint = run.newest()
    state = read_state(checkpoint) if checkpoint is not None else TrainState(0)
    examine = _latents if config.data.mode == "offline" else _images
    source, rows, positions, embedded, columns = examine(config, model, newest=state.position == 0)
    _check_validation(config, model)
    tight = fit(config, sources.known(model, storage=options), embedded=embedded)
    batch = config.data.batch_of(config.scaling.most)
    if rows < batch:
        raise DatasetError(
            f"{config.source.uri}: expected at least {batch} rows, one step's, got {rows}; lower data.batch_size or "
            "data.global_batch_size, or process more images"
        )
    if checkpoint is not None and state.position:
        _refuse_another_epoch(config, checkpoint, state, rows)
    counted = source is not None and source.rows <= _COUNTED
    return TrainPlan(
        run.storage.uri,
        rows,
        positions,
        batch,
        state,
        checkpoint=checkpoint.uri if checkpoint is not None else None,
        last_step=last_step(config, state, positions, batch),
        finished=reached_limit(config, state) or used_up_budget(config, state),
        tight=tight,
        changed={} if checkpoint is None else _changed(read_config(checkpoint), config),
        columns=columns,
        taken_down=0 if source is None else len(tombstones.load(source.storage).rows),
        used=_used(config, source) if source and counted and not (columns or config.source.also) else None,
    )


def _used(config: TrainConfig, source: Dataset) -> dict[str, int]:
    """Count the rows of a dataset by their use in training."""
    used = Counter(dict.fromkeys(("written", "held out", "taken down", "repeated"), 0))  # in this order
    for account in accounts(source.storage, []):
        rows, outcomes = account["row"].to_numpy(), np.array(account["outcome"].to_pylist(), object)
        outcomes[held_out(rows, config.data.holdout) & (outcomes == WRITTEN)] = "held out"
        used.update(str(outcome).replace("_", " ") for outcome in outcomes[rows < (config.limit or source.rows)])
    return {name: count for name, count in used.items() if name not in (FAILED, FILTERED)}


def _refuse_other_networks(config: TrainConfig, other: Storage) -> None:
    """Refuse to begin with a run that has trained other networks: a U-Net needs its own text encoder."""
    trained, family = read_config(other), sources.family(config.model.source, storage=config.storage.options())
    if trained["objective"]["prediction"] not in family.predictions:
        hint = "begin with a run of the same kind of model"
        raise ConfigError([Problem("model.start_from", f"a run of {family.name}", other.uri, hint)])
    was = trained["model"]["train_text_encoder"]
    if was != config.model.train_text_encoder:
        expected, got = (str(flag).lower() for flag in (was, config.model.train_text_encoder))
        hint = "or export that run with sdp export and begin with the result (model.source)"
        raise ConfigError([Problem("model.train_text_encoder", f"{expected}, as in {other.uri}", got, hint)])


def _changed(before: Mapping[str, Any], config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys of TUNABLE that have changed, max_steps if the schedule depends on it, and the global batch."""
    now, changed = config.model_dump(mode="json"), {}
    for path in TUNABLE:
        section, name = path.split(".")
        changed[path] = before[section][name], now[section][name]
    if config.optimizer.schedule != "constant":
        changed["max_steps"] = before.get("max_steps"), config.max_steps
    data, workers = before["data"], before["scaling"]["num_workers"]
    most = workers["max"] if isinstance(workers, Mapping) else workers
    batch = config.data.batch_of(config.scaling.most)
    changed["data.global_batch_size"] = data.get("global_batch_size") or data["batch_size"] * most, batch
    return {path: values for path, values in changed.items() if values[0] != values[1]}


def _refuse_another_epoch(config: TrainConfig, checkpoint: Storage, state: TrainState, rows: int) -> None:
    """Refuse to continue an epoch with other rows: its order would repeat some and miss others."""
    marker = read_marker(checkpoint)
    hint = "set it back; it may change when max_epochs has ended the epoch"
    limit = read_config(checkpoint).get("limit")
    if limit != config.limit:
        raise ConfigError([Problem("limit", f"{limit} until epoch {state.epoch} is over", str(config.limit), hint)])
    granule = marker.get("granule", config.data.batch_size)
    if granule != config.data.batch_size:
        expected = f"{granule} until epoch {state.epoch} is over, whose crops have several shapes"
        raise ConfigError([Problem("data.batch_size", expected, str(config.data.batch_size), hint)])
    begun = marker.get("epoch_rows", rows)
    if begun != rows:
        raise DatasetError(
            f"{config.source.uri}: expected {begun} rows, with which epoch {state.epoch} began, got {rows}; restore "
            "the dataset, or choose another output.uri and set model.start_from to this run"
        )


def _latents(
    config: TrainConfig, model: ModelSource, *, newest: bool
) -> tuple[Dataset | None, int, int, bool, Columns | None]:
    """Check latents; return the rows and positions of an epoch, whether captions are embeddings, and no columns.

    The dataset comes first; it is None if another program wrote it.
    """
    opened = open_sources(config, newest=newest)
    for source in opened.all:
        _check_encoder(config, source.written, source.dataset, model)
    if opened.buckets is not None:
        _refuse_split_granules(config)
    steps = opened.plan(config)
    positions = steps.positions(EpochStart(lanes=max(Shuffle().lanes, config.scaling.most)))
    first = opened.all[0]
    return first.written, steps.rows, positions, first.dataset.text.name == TEXT, None


def _refuse_split_granules(config: TrainConfig) -> None:
    """Refuse a global batch that is not made of whole micro-batches, each of which has one shape."""
    global_batch, batch = config.data.global_batch_size, config.data.batch_size
    if global_batch is not None and global_batch % batch:
        hint = "the dataset's crops have several shapes, and a trainer's batch has one"
        expected = f"a multiple of data.batch_size ({batch})"
        raise ConfigError([Problem("data.global_batch_size", expected, str(global_batch), hint)])


def _images(
    config: TrainConfig, _: ModelSource, *, newest: bool
) -> tuple[Dataset | None, int, int, bool, Columns | None]:
    """Check images; return what `_latents` returns."""
    dataset = open_pinned(config, 0, config.source.uri, "images", newest=newest)
    parts = dataset.parts.select(["written", "start"]).to_pylist()
    rows = sum(part["written"] for part in parts if config.limit is None or part["start"] < config.limit)
    return dataset, rows, rows, config.text_encoded, open_columns(config, dataset)


def _needed(config: TrainConfig) -> tuple[str, ...]:
    """Return the parts of the model that are needed: encoding or drawing pictures needs the VAE."""
    through_vae = config.data.mode != "offline" or config.samples.every_steps is not None
    return (*PARTS, "vae") if through_vae else PARTS


def _check_validation(config: TrainConfig, model: ModelSource) -> None:
    """Check that the validation rows exist, and were encoded by the same model."""
    source, options = config.evaluate.source, config.storage.options()
    if config.evaluate.every_steps is None or source is None:  # then no rows, or held-out ones
        return
    dataset = open_dataset(open_storage(source, options), "latents")
    latents = open_latents(dataset, config.data.resolution)
    refuse_embeddings(config, latents, source)
    _check_encoder(config, dataset, latents, model)


def _check_encoder(config: TrainConfig, dataset: Dataset | None, latents: LatentsDataset, model: ModelSource) -> None:
    """Refuse latents of another model; if this one is elsewhere, the workers do, once they have it."""
    if model.kind in ("builtin", "local"):
        local = sources.resolve(model, storage=config.storage.options())
        refuse_another_encoder(config, dataset, latents, local)
