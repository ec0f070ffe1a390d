"""Checks and decisions before anything costly begins: networks, pictures, checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyroaring import BitMap64

from sdp.config import EvaluateConfig
from sdp.config.evaluate import PictureSource
from sdp.datasets import tombstones
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import HEAD, Head, Output, open_output, read_head
from sdp.datasets.units import Work
from sdp.encode.pictures import Pictures, open_pictures
from sdp.encode.reading import Piece
from sdp.encode.work import SourceSpec
from sdp.errors import DatasetError, UserError
from sdp.evaluate.layout import GENERATED, KIND, REFERENCE
from sdp.evaluate.loss import LossSpec, plan_loss
from sdp.model import networks
from sdp.model.networks import FeatureNetwork
from sdp.storage import StorageOptions, is_read_only, open_storage

ReadTask = tuple[str, Work, Sequence[Piece]]
"""The name of a set, a unit of it, and the pieces to read."""


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec(SourceSpec):
    """The settings of the evaluators for one set of pictures."""

    config: EvaluateConfig
    features: FeatureNetwork | None
    clip: FeatureNetwork | None
    """The network of the CLIP score; None for the reference."""


@dataclass(frozen=True)
class PictureSet:
    """One of the two sets of pictures, and the dataset of its features."""

    name: str
    pictures: Pictures
    head: Head
    limit: int | None
    spec: EvaluateSpec

    def begin(self) -> Output:
        """Open the dataset of features, and assign addresses to new pictures."""
        return self.pictures.freeze(open_output(self.spec.output, self.head), self.limit, self.spec.storage)


@dataclass(frozen=True)
class EvaluatePlan:
    """A checked evaluation."""

    config: EvaluateConfig
    clip: FeatureNetwork | None
    features: FeatureNetwork | None
    sets: tuple[PictureSet, ...]
    reused: Dataset | None
    """The reference's features, if an earlier evaluation made them."""
    loss: LossSpec | None

    @property
    def options(self) -> StorageOptions:
        return self.config.storage.options()


def prepare(config: EvaluateConfig) -> EvaluatePlan:
    """Check everything that is cheap to check. Writes nothing."""
    options = config.storage.options()
    loss = plan_loss(config)
    reused = _find_reused(config, options)
    sections: dict[str, tuple[str, PictureSource]] = {GENERATED: ("source", config.source)}
    if reused is None:
        sections[REFERENCE] = ("reference", config.reference)
    opened = {
        name: open_pictures(key, source.uri, options, image=source.image_column, caption=source.caption_column)
        for name, (key, source) in sections.items()
        if source.uri is not None
    }
    if config.clip.model is not None and not opened[GENERATED].captioned:
        raise UserError(
            f"source.uri: {opened[GENERATED].uri} has no captions for a CLIP score; set source.caption_column, use the "
            "dataset that the pictures are from, or remove clip.model"
        )
    clip, features = (
        networks.find(model, key, storage=options) if model is not None else None
        for key, model in (("clip.model", config.clip.model), ("features.model", config.features.model))
    )
    if clip is not None and clip.kind != "clip":
        raise UserError(f"clip.model: expected a CLIP model, got {clip.source}, which is of type {clip.kind}")
    sets = [
        _picture_set(name, pictures, features, clip if name == GENERATED else None, config)
        for name, pictures in opened.items()
    ]
    if reused is not None:
        _refuse_other_features(reused, features, config)
    return EvaluatePlan(config, clip, features, tuple(sets), reused, loss)


def _picture_set(
    name: str, pictures: Pictures, features: FeatureNetwork | None, clip: FeatureNetwork | None, config: EvaluateConfig
) -> PictureSet:
    identity: dict[str, Any] = {"image_column": pictures.columns.image}
    if features is not None:
        identity |= identity_of(features, config)
    if clip is not None:
        identity |= {"clip.digest": clip.digest, "caption_column": pictures.columns.caption}
    upstream, options = pictures.dataset, config.storage.options()
    spec = EvaluateSpec(
        config=config,
        features=features,
        clip=clip,
        columns=pictures.columns,
        storage=options,
        output=open_storage(config.output.uri, options).child(name),
        taken_down=taken_down(upstream, options).serialize(),
        repeated=upstream.repeated_rows if upstream is not None else None,
        foreign=upstream is None,
    )
    limit = config.limit if name == GENERATED else config.reference.limit
    return PictureSet(name, pictures, Head(KIND, config.output.rows_per_file, not spec.foreign, identity), limit, spec)


def taken_down(dataset: Dataset | None, options: StorageOptions) -> BitMap64:
    """Return the addresses of a dataset, if there is one, that are taken down now."""
    return BitMap64() if dataset is None else tombstones.load(dataset.storage, options).rows


def identity_of(features: FeatureNetwork, config: EvaluateConfig) -> dict[str, Any]:
    """Return the keys that decide a picture's features."""
    resize = config.features.resize if features.kind == "inception" else None
    return {"features.digest": features.digest, "features.resize": resize}


def _find_reused(config: EvaluateConfig, options: StorageOptions) -> Dataset | None:
    uri = config.reference.uri
    if uri is None or "*" in uri or is_read_only(uri):
        return None
    folder = open_storage(uri, options)
    if not folder.exists(HEAD) or read_head(folder).kind != KIND:
        return None
    return open_dataset(folder, KIND)


def _refuse_other_features(reused: Dataset, features: FeatureNetwork | None, config: EvaluateConfig) -> None:
    assert features is not None  # the configuration requires it with a reference
    for name, value in identity_of(features, config).items():
        earlier = reused.head.identity.get(name)
        if earlier != value:
            raise DatasetError(
                f"reference.uri: {reused.storage.uri} has features of another network or resizing (there {name} is "
                f"{earlier!r}, here {value!r}); use the same, or name the pictures themselves"
            )


def pinned(network: FeatureNetwork) -> str:
    """Return a network's name and digest, for a result."""
    return f"{replace(network.source, sha256=None)} sha256:{network.digest}"
