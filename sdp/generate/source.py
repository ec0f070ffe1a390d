"""The model that draws: a checkpoint of sdp train, or a whole model.

Resolved on the driver, without torch, before anything costly begins; `painter` loads it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sdp.config.generate import GenerateConfig
from sdp.errors import DatasetError, UserError
from sdp.families import INDEX, every, refuse_sides
from sdp.model import checkpoints, sources
from sdp.model.layout import ModelSource
from sdp.storage import Storage, StorageOptions, open_storage

_BESIDE_TRAINED = ("vae", "text_encoder", "tokenizer", "scheduler")
"""The parts of the base model that are read beside a checkpoint. If the checkpoint has a trained text encoder, only the
configuration of the base model's counts."""


@dataclass(frozen=True)
class GenerateModel:
    """The resolved model that draws."""

    uri: str
    """The checkpoint that each picture's row names."""
    digest: str
    """Identifies the weights."""
    base: ModelSource
    """The VAE, the tokenizer and every network that a checkpoint does not hold; pinned by its digest."""
    checkpoint: Storage | None = None
    """The folder of the weights that were trained, if they are not the base model's."""
    ema: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training that override the base model's scheduler configuration."""


def settled(config: GenerateConfig) -> GenerateConfig:
    """Return the configuration with what its checkpoint decides: {step} in output.uri, and the resolution."""
    newest = _newest(config)
    output = config.output
    if checkpoints.STEP in output.uri:
        drawn_with = config.checkpoint if newest is None else newest.uri
        output = output.replaced(uri=checkpoints.with_step(output.uri, drawn_with))
    side = None if newest is None else checkpoints.training_config(newest).data.resolution
    return config.with_defaults(resolution=side).replaced(output=output)


def choose(config: GenerateConfig, begun: str | None = None) -> GenerateModel:
    """Resolve the setting `checkpoint`; `begun` is the checkpoint that an existing output was begun with."""
    newest, options = _newest(config), config.storage.options()
    if newest is None:
        return _of_model(config, sources.parse(config.checkpoint), options)
    return _of_checkpoint(config, _begun_with(newest, config, begun, options), options)


def _newest(config: GenerateConfig) -> Storage | None:
    """Return the checkpoint that is named, or the newest one of the run; None for a model."""
    options = config.storage.options()
    if sources.parse(config.checkpoint).kind in ("hub", "builtin"):
        return None
    folder = open_storage(config.checkpoint, options)
    if folder.exists(INDEX) or any(folder.exists(f"{family.denoiser}/config.json") for family in every()):
        return None
    try:
        return checkpoints.find_checkpoint(config.checkpoint, options)
    except DatasetError as error:
        raise UserError(
            f"checkpoint: {config.checkpoint}: neither a complete checkpoint of sdp train, nor a run that has one "
            f"(no {checkpoints.COMPLETE}), nor a model in diffusers layout (no {INDEX}); check the URI"
        ) from error


def _begun_with(newest: Storage, config: GenerateConfig, begun: str | None, options: StorageOptions) -> Storage:
    """Return the checkpoint itself; for a run, the checkpoint that the output was begun with, if it still exists."""
    folder, _, name = newest.uri.rpartition("/")
    if begun in (None, name) or newest.uri == open_storage(config.checkpoint, options).uri:
        return newest
    older = open_storage(f"{folder}/{begun}", options)
    if not checkpoints.is_checkpoint(older):
        raise UserError(
            f"checkpoint: {config.output.uri} was begun with {older.uri}, which no longer exists; choose another "
            f"output.uri for {newest.uri}"
        )
    return older


def _resolved(config: GenerateConfig, source: ModelSource, digest: str | None) -> sources.LocalModel:
    """Return a source's local model; refuse a sampler of diffusion for a flow, and a resolution that does not fit."""
    options = config.storage.options()
    if (name := config.sampler.scheduler) != "ddim" and sources.prediction_type(source, storage=options) == "flow":
        raise UserError(f"sampler.scheduler: expected ddim, which means Euler's steps for a flow, got {name!r}")
    model = sources.resolve(replace(source, sha256=digest), storage=options)
    refuse_sides("resolution", model.path, [config.resolution])
    return model


def _of_model(config: GenerateConfig, source: ModelSource, options: StorageOptions) -> GenerateModel:
    if config.weights != "auto":
        raise UserError(
            f"weights: expected auto where checkpoint is a model, got {config.weights!r}; a model has only one set"
        )
    if config.model is not None:
        raise UserError("model: expected null where checkpoint is a model, which has all of its parts; remove it")
    source = sources.check(source, storage=options, pretrained=True)
    digest = _resolved(config, source, None).digest
    uri = str(source) if source.kind in ("hub", "builtin") else open_storage(source.uri, options).uri
    return GenerateModel(uri, digest, replace(source, sha256=digest))


def _of_checkpoint(config: GenerateConfig, folder: Storage, options: StorageOptions) -> GenerateModel:
    training = checkpoints.training_config(folder)
    objective = training.objective
    source = sources.check(config.model or training.model.source, _BESIDE_TRAINED, storage=options)
    model = _resolved(config, source, checkpoints.base_digest(folder))
    return GenerateModel(
        uri=folder.uri,
        digest=hashlib.sha256(folder.read(checkpoints.COMPLETE) + folder.read("tensors.json")).hexdigest(),
        base=model.source,
        checkpoint=folder,
        ema=checkpoints.averages(training, config.weights, folder),
        scheduler=checkpoints.trained_scheduler(str(objective.prediction), objective.zero_terminal_snr),
    )
