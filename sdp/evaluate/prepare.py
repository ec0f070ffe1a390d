"""Checks and decisions before anything costly begins: networks, pictures, checkpoint."""

import sys
import tempfile
from dataclasses import dataclass

from sdp.config.evaluate import EvaluateConfig
from sdp.datasets import tombstones
from sdp.datasets.output import Head, open_output
from sdp.encode.work import SourceSpec
from sdp.errors import UserError
from sdp.evaluate.layout import GENERATED, REFERENCE
from sdp.model import networks
from sdp.model.networks import FeatureNetwork
from sdp.sources.pictures import Pictures, Selection, open_pictures
from sdp.sources.pieces import Piece
from sdp.storage import open_storage

Task = tuple[str, Piece]
"""The name of a set, and pictures of it."""
UNIT_ROWS = 1024
"""Pictures of a unit, which one evaluator does at a time."""


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec(SourceSpec):
    """The settings of the evaluators for one set of pictures."""

    features: FeatureNetwork | None
    clip: FeatureNetwork | None
    """The network of the CLIP score; None for the reference."""


@dataclass(frozen=True)
class PictureSet:
    """One of the two sets of pictures."""

    name: str
    pictures: Pictures
    limit: int | None
    spec: EvaluateSpec

    def tasks(self) -> list[Task]:
        """Assign addresses to the pictures, and return the units that have some, each as one piece."""
        with tempfile.TemporaryDirectory(prefix="sdp-evaluate-") as folder:  # for the index alone
            head = Head("features", UNIT_ROWS, self.pictures.dataset is not None, {})
            storage = open_storage(folder, self.spec.storage)
            output = self.pictures.freeze(open_output(storage, head), self.limit)
            planner = self.pictures.planner(output, sys.maxsize, self.spec.storage)
            return [(self.name, piece) for work in output.index.works() for piece in planner(work)]


@dataclass(frozen=True)
class EvaluatePlan:
    """A checked evaluation."""

    config: EvaluateConfig
    clip: FeatureNetwork | None
    features: FeatureNetwork | None
    sets: tuple[PictureSet, ...]


def prepare(config: EvaluateConfig) -> EvaluatePlan:
    """Check everything that is cheap to check. Writes nothing."""
    options = config.storage.options()
    source, reference = config.source, config.reference
    selection = Selection(image=source.image_column, caption=source.caption_column)
    opened = {GENERATED: open_pictures("source", source.uri, options, selection)}
    if reference.uri is not None:
        selection = Selection(image=reference.image_column)
        opened[REFERENCE] = open_pictures("reference", reference.uri, options, selection)
    if config.clip.model is not None and not opened[GENERATED].captions:
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
    sets = []
    for name, pictures in opened.items():
        dataset = pictures.dataset
        spec = EvaluateSpec(
            features=features,
            clip=clip if name == GENERATED else None,
            columns=pictures.columns,
            storage=options,
            output=open_storage(config.output.uri, options),
            taken_down=tombstones.load(dataset.storage).rows.serialize() if dataset is not None else b"",
            repeated=dataset.repeated_rows if dataset is not None else None,
            foreign=dataset is None,
        )
        sets.append(PictureSet(name, pictures, config.limit if name == GENERATED else None, spec))
    return EvaluatePlan(config, clip, features, tuple(sets))


def pinned(network: FeatureNetwork) -> str:
    """Return a network's name and digest, for a result."""
    return f"{network.source} sha256:{network.digest}"
