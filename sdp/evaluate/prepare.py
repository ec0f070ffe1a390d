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
from sdp.storage import Storage, StorageOptions, is_read_only, open_storage

Task = tuple[str, Work, Sequence[Piece]]
"""The name of a set, a unit of it, and the pieces to read."""


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec(SourceSpec):
    """The settings of the evaluators for one set of pictures."""

    config: EvaluateConfig
    features: FeatureNetwork | None
    clip: FeatureNetwork | None


@dataclass(frozen=True)
class PictureSet:
    """One of the two sets of pictures, and the dataset of its features."""

    name: str
    pictures: Pictures
    clip: FeatureNetwork | None
    """The network of the CLIP score; None for the reference."""
    storage: Storage
    """The folder of its features."""
    head: Head
    limit: int | None

    def begin(self, options: StorageOptions) -> Output:
        """Open the dataset of features, and assign addresses to new pictures."""
        return self.pictures.freeze(open_output(self.storage, self.head), self.limit, options)

    def taken_down(self, options: StorageOptions) -> BitMap64:
        """Return the addresses that are taken down now."""
        dataset = self.pictures.dataset
        return BitMap64() if dataset is None else tombstones.load(dataset.storage, options).rows

    def spec(self, config: EvaluateConfig, features: FeatureNetwork | None) -> EvaluateSpec:
        """Return what the evaluators need to know."""
        options, upstream = config.storage.options(), self.pictures.dataset
        return EvaluateSpec(
            features=features,
            clip=self.clip,
            columns=self.pictures.columns,
            config=config,
            output=self.storage,
            storage=options,
            taken_down=self.taken_down(options).serialize(),
            repeated=upstream.repeated_rows if upstream is not None else None,
            foreign=upstream is None,
        )


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
    output = open_storage(config.output.uri, options)
    loss = plan_loss(config)
    sets: list[PictureSet] = []
    reused = _find_reused(config, options)
    generated = _open("source", config.source, options) if config.source.uri is not None else None
    opens_reference = config.reference.uri is not None and reused is None
    reference = _open("reference", config.reference, options) if opens_reference else None
    if config.clip.model is not None and generated is not None and not generated.captioned:
        raise UserError(
            f"source.uri: {generated.uri} has no captions for a CLIP score; set source.caption_column, use the dataset "
            "that the pictures are from, or remove clip.model"
        )
    clip = networks.find(config.clip.model, "clip.model", storage=options) if config.clip.model is not None else None
    if clip is not None and clip.kind != "clip":
        raise UserError(f"clip.model: expected a CLIP model, got {clip.source}, which is of type {clip.kind}")
    model = config.features.model
    features = networks.find(model, "features.model", storage=options) if model is not None else None
    if generated is not None:
        sets.append(_picture_set(GENERATED, generated, features, clip, output, config))
    if reference is not None:
        sets.append(_picture_set(REFERENCE, reference, features, None, output, config))
    if reused is not None:
        _refuse_other_features(reused, features, config)
    return EvaluatePlan(config, clip, features, tuple(sets), reused, loss)


def _open(key: str, section: PictureSource, options: StorageOptions) -> Pictures:
    assert section.uri is not None
    return open_pictures(key, section.uri, options, image=section.image_column, caption=section.caption_column)


def _picture_set(
    name: str,
    pictures: Pictures,
    features: FeatureNetwork | None,
    clip: FeatureNetwork | None,
    output: Storage,
    config: EvaluateConfig,
) -> PictureSet:
    identity: dict[str, Any] = {"image_column": pictures.columns.image}
    if features is not None:
        identity |= identity_of(features, config)
    if clip is not None:
        identity |= {"clip.digest": clip.digest, "caption_column": pictures.columns.caption}
    head = Head(KIND, config.output.rows_per_file, pictures.dataset is not None, identity)
    limit = config.limit if name == GENERATED else config.reference.limit
    return PictureSet(name, pictures, clip, output.child(name), head, limit)


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
