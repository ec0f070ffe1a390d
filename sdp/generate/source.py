"""What pictures are drawn with: a checkpoint of sdp train, or a model.

Found out on the driver, without torch, before anything costly is taken; loaded by `painter`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sdp.config.generate import GenerateConfig
from sdp.datasets.output import read_json
from sdp.errors import DatasetError, NotFound, UserError
from sdp.model import sources
from sdp.model.checkpoints import COMPLETE, CONFIG, find_checkpoint, read_marker
from sdp.model.layout import INDEX
from sdp.model.sources import ModelSource
from sdp.storage import Storage, StorageOptions, open_storage

_AROUND = ("vae", "text_encoder", "tokenizer", "scheduler")
"""What a checkpoint, which is of the U-Net alone, needs besides."""


@dataclass(frozen=True)
class Drawer:
    """What to draw with, settled."""

    uri: str
    """What each picture names as its checkpoint."""
    digest: str
    """Changes with the weights."""
    model: ModelSource
    """The VAE, the text encoder, the tokenizer and, without a checkpoint, the U-Net; its digest is pinned."""
    checkpoint: Storage | None = None
    """Where the U-Net's weights are, if not in the model."""
    ema: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """What the training settled, over the model's own scheduler configuration."""


def choose(config: GenerateConfig, begun: str | None = None) -> Drawer:
    """What `checkpoint` means. `begun` is what the output has been begun with, if it has been."""
    options = config.storage.options()
    source = sources.parse(config.checkpoint)
    if source.kind in ("hub", "builtin"):
        return _of_model(config, source, options)
    folder = open_storage(config.checkpoint, options)
    if folder.exists(INDEX) or folder.exists("unet/config.json"):
        return _of_model(config, source, options)
    try:
        newest = find_checkpoint(config.checkpoint, options)
    except DatasetError as error:
        raise UserError(
            f"checkpoint: {config.checkpoint}: neither a complete checkpoint of sdp train, nor a run that has one "
            f"(no {COMPLETE}), nor a model in diffusers layout (no {INDEX}); check the address"
        ) from error
    return _of_checkpoint(config, _begun_with(newest, config, begun, options), options)


def _begun_with(newest: Storage, config: GenerateConfig, begun: str | None, options: StorageOptions) -> Storage:
    """The checkpoint itself; or of a run the one that the output was begun with, however the run has gone on."""
    checkpoints, _, name = newest.uri.rpartition("/")
    if begun in (None, name) or newest.uri == open_storage(config.checkpoint, options).uri:
        return newest
    older = open_storage(f"{checkpoints}/{begun}", options)
    if not older.exists(COMPLETE):
        raise UserError(
            f"checkpoint: {config.output.uri} was begun with {older.uri}, which is gone since; choose another "
            f"output.uri for {newest.uri}"
        )
    return older


def _of_model(config: GenerateConfig, source: ModelSource, options: StorageOptions) -> Drawer:
    if config.weights != "auto":
        raise UserError(
            f"weights: expected auto where checkpoint is a model, got {config.weights!r}; a model has one set"
        )
    if config.model is not None:
        raise UserError("model: expected null where checkpoint is a model, which has all of its parts; remove it")
    found = sources.resolve(sources.check(source, storage=options), storage=options)
    uri = str(source) if source.kind in ("hub", "builtin") else open_storage(source.uri, options).uri
    return Drawer(uri, found.digest, replace(source, sha256=found.digest))


def _of_checkpoint(config: GenerateConfig, folder: Storage, options: StorageOptions) -> Drawer:
    marker = read_marker(folder)
    try:
        trained = read_json(folder, CONFIG)
    except NotFound as error:
        raise DatasetError(f"{folder.uri}: no {CONFIG} in it; take another checkpoint") from error
    try:
        told, pinned = trained["model"]["source"], marker["model"]["digest"]
        objective, decay = trained["objective"], trained["ema"]["decay"]
        overrides = trained_scheduler(objective["prediction"], bool(objective["zero_terminal_snr"]))
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{folder.uri}: its {CONFIG} lacks {error}; take another checkpoint") from error
    if config.weights == "ema" and decay is None:
        raise UserError(
            f"weights: expected raw or auto, got 'ema': {folder.uri} has no moving average (ema.decay was null)"
        )
    source = sources.check(config.model or told, _AROUND, storage=options)
    model = sources.resolve(replace(source, sha256=pinned), storage=options)
    return Drawer(
        uri=folder.uri,
        digest=hashlib.sha256(folder.read(COMPLETE) + folder.read("tensors.json")).hexdigest(),
        model=model.source,
        checkpoint=folder,
        ema=decay is not None and config.weights != "raw",
        scheduler=overrides,
    )


def trained_scheduler(prediction: str, zero_terminal_snr: bool) -> dict[str, Any]:
    """What a training's objective settles of a sampler's configuration."""
    settings: dict[str, Any] = {"prediction_type": "v_prediction" if prediction == "v" else "epsilon"}
    if zero_terminal_snr:  # the last timestep must be among those sampled: there all is noise
        settings |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return settings
