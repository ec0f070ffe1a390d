"""The denoising loss of a checkpoint on latents that it was not trained on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdp.config import EvaluateConfig, TrainConfig, parse
from sdp.datasets.manifest import open_dataset
from sdp.datasets.output import read_json
from sdp.errors import ConfigError, DatasetError, NotFound, UserError
from sdp.model import sources
from sdp.model.checkpoints import CONFIG, find_checkpoint, read_marker
from sdp.model.sources import ModelSource
from sdp.storage import Storage, StorageOptions, open_storage

_PARTS = ("unet", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True)
class LossOrders:
    """What is to be measured, settled."""

    checkpoint: Storage
    ema: bool
    training: Mapping[str, Any]
    """The configuration that the checkpoint was trained by, with the resolution and the source to measure on."""
    model: ModelSource
    source: str | None
    """A dataset of which all rows are taken; None: what the training has held out."""
    rows: int
    buckets: int
    batch_size: int
    storage: StorageOptions

    @property
    def dataset(self) -> str:
        """What is measured on."""
        return self.source or str(self.training["source"]["uri"])


@dataclass(frozen=True)
class LossFound:
    """What was measured."""

    by_timestep: Mapping[str, float]
    mean: float
    error: float
    rows: int


def plan_loss(config: EvaluateConfig) -> LossOrders | None:
    """What a configuration asks for; all is looked at that can be for little, without torch."""
    told = config.loss
    options = config.storage.options()
    if told.checkpoint is None:
        return None
    try:
        folder = find_checkpoint(told.checkpoint, options)
    except DatasetError as error:
        raise UserError(f"loss.checkpoint: {error}") from error
    marker = read_marker(folder)
    training = _training(folder)
    if told.resolution is not None:
        training = training.model_copy(
            update={"data": training.data.model_copy(update={"resolution": told.resolution})}
        )
    _refuse_seen(training, told.source, folder)
    if told.weights == "ema" and training.ema.decay is None:
        raise UserError(f"loss.weights: expected raw or auto, got 'ema': {folder.uri} has no moving average")
    open_dataset(open_storage(told.source or training.source.uri, options), "latents")
    source = sources.check(told.model or training.model.source, _PARTS, storage=options)
    return LossOrders(
        checkpoint=folder,
        ema=training.ema.decay is not None and told.weights != "raw",
        training=training.model_dump(mode="json"),
        model=replace(source, sha256=marker["model"]["digest"]),
        source=told.source,
        rows=told.rows,
        buckets=told.buckets,
        batch_size=told.batch_size,
        storage=options,
    )


def _training(folder: Storage) -> TrainConfig:
    try:
        return parse("train", read_json(folder, CONFIG))
    except NotFound as error:
        raise DatasetError(f"{folder.uri}: no {CONFIG} in it; take another checkpoint") from error
    except ConfigError as error:
        raise DatasetError(
            f"{folder.uri}: its {CONFIG} is not one of this sdp ({error.problems[0]}); use the sdp that wrote it"
        ) from error


def _refuse_seen(training: TrainConfig, source: str | None, folder: Storage) -> None:
    if source is not None:
        return
    if training.data.mode != "offline":
        raise UserError(f"loss.source: expected a latents dataset, got null: {folder.uri} was trained on images")
    if not training.data.holdout:
        raise UserError(
            f"loss.source: expected a latents dataset, got null: {folder.uri} was trained on all of its own "
            "(data.holdout was 0)"
        )


class LossWorker:
    """Measures: an evaluator like those of pictures, with one task."""

    def make(self, orders: LossOrders, seen: Callable[[int], None] = lambda _: None) -> LossFound:
        """The losses; `seen` is called with the number of rows."""
        from sdp.model.trained import load_trained
        from sdp.train.assemble import make_conditioning, make_objective
        from sdp.train.strategies import Replicated
        from sdp.train.validation import load_unseen, measure, unseen_of
        from sdp.train.world import World, choose_device

        training = parse("train", orders.training)
        world = World(device=choose_device())
        model = sources.resolve(orders.model, storage=orders.storage)
        unet = load_trained(orders.checkpoint, model.path, ema=orders.ema, name=str(orders.model))
        unet = unet.to(world.device).eval().requires_grad_(False)
        batch = load_unseen(unseen_of(training, orders.source), orders.rows, world, orders.batch_size)
        found = measure(
            unet,
            make_objective(training, model, world),
            make_conditioning(training, model, world),
            batch,
            buckets=orders.buckets,
            batch_size=orders.batch_size,
            world=world,
            forward=Replicated(unet, world, training.precision).forward,
        )
        seen(found.rows)
        return LossFound(found.by_timestep, found.mean, found.error, found.rows)
