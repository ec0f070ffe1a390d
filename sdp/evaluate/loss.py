"""The denoising loss of a checkpoint on latents that it was not trained on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sdp.config import EvaluateConfig, TrainConfig
from sdp.config.evaluate import LossConfig
from sdp.datasets.manifest import open_dataset
from sdp.errors import DatasetError, UserError
from sdp.model import sources
from sdp.model.checkpoints import averages, base_digest, find_checkpoint, training_config
from sdp.model.layout import ModelSource
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.train.data.latents import open_latents, refuse_embeddings

if TYPE_CHECKING:
    from sdp.train.validation import Validation

_BATCH = 32
"""Rows at once, which fit any GPU that holds the networks."""
_PARTS = ("unet", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True)
class LossSpec:
    """A resolved measurement of the loss."""

    checkpoint: Storage
    ema: bool
    training: TrainConfig
    """The checkpoint's training configuration, with the resolution and the source to measure on."""
    model: ModelSource
    settings: LossConfig
    storage: StorageOptions

    @property
    def dataset(self) -> str:
        """URI of the latents to measure on."""
        return self.settings.source or self.training.source.uri


def plan_loss(config: EvaluateConfig) -> LossSpec | None:
    """Resolve and check the section `loss`, without torch; None if it names no checkpoint."""
    section = config.loss
    options = config.storage.options()
    if section.checkpoint is None:
        return None
    try:
        folder = find_checkpoint(section.checkpoint, options)
    except DatasetError as error:
        raise UserError(f"loss.checkpoint: {error}") from error
    training = training_config(folder)
    if section.source is None and (training.data.mode != "offline" or not training.data.holdout):
        seen = "images" if training.data.mode != "offline" else "all of its own (data.holdout was 0)"
        raise UserError(f"loss.source: expected a latents dataset, got null: {folder.uri} was trained on {seen}")
    dataset = open_dataset(open_storage(section.source or training.source.uri, options), "latents")
    if section.source is not None:
        refuse_embeddings(training, open_latents(dataset, training.data.resolution), section.source)
    source = sources.check(section.model or training.model.source, _PARTS, storage=options)
    return LossSpec(
        checkpoint=folder,
        ema=averages(training, section.weights, "loss.weights", folder),
        training=training,
        model=replace(source, sha256=base_digest(folder)),
        settings=section,
        storage=options,
    )


class LossWorker:
    """An evaluator whose one task is to measure the loss."""

    def make(self, spec: LossSpec, on_rows: Callable[[int], None] = lambda _: None) -> "Validation":
        """Measure the losses; call `on_rows` with the number of rows."""
        from sdp.device import choose_device, share_cores
        from sdp.model.trained import load_trained
        from sdp.train.assemble import make_conditioning, make_objective
        from sdp.train.strategies import Replicated
        from sdp.train.validation import load_validation_batch, measure, validation_rows
        from sdp.train.world import World

        training, settings = spec.training, spec.settings
        world = World(device=choose_device())
        model = sources.resolve(spec.model, storage=spec.storage)
        networks = load_trained(spec.checkpoint, model.path, ema=spec.ema, name=str(spec.model))
        networks = networks.to(world.device).eval().requires_grad_(False)
        share_cores(world.device, networks)
        latents, weigh = validation_rows(training, settings.source)
        batch = load_validation_batch(latents, weigh, settings.rows, world, _BATCH)
        loss = measure(
            networks,
            make_objective(training, model, world),
            make_conditioning(training, model, world),
            batch,
            batch_size=_BATCH,
            world=world,
            forward=Replicated(networks, world, training.precision).forward,
        )
        on_rows(loss.rows)
        return loss
