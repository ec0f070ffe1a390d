"""The latents that a run is told to train on: source.uri, and what is mixed in."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.config import TrainConfig
from sdp.config.train import ColumnsConfig
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import HEAD
from sdp.encode.table import EMPTY_TEXT
from sdp.errors import DatasetError, SdpError
from sdp.storage import Storage, is_read_only, open_storage
from sdp.train.data.buckets import count_buckets, views
from sdp.train.data.direct import Ingredient, mixture_of
from sdp.train.data.latents import TEXT, open_latents, refuse_embeddings
from sdp.train.data.order import Ints
from sdp.train.data.pinned import open_pinned
from sdp.train.data.plain import freeze, open_plain
from sdp.train.data.weights import RowWeights, Weigh, row_weights


@dataclass(frozen=True)
class Source:
    """One of the datasets."""

    ingredient: Ingredient
    lineage: dict[str, Any]
    dataset: Dataset | None
    """None of plain files."""


@dataclass(frozen=True)
class Sources:
    """All of them, source.uri first."""

    all: tuple[Source, ...]
    buckets: Ints | None = None
    """How many rows each row group has of each shape, where crops keep their aspect."""

    @property
    def ingredients(self) -> tuple[Ingredient, ...]:
        """What a reader is made of: the datasets, or the one dataset's buckets."""
        if self.buckets is not None:
            (source,) = self.all
            return tuple(
                replace(source.ingredient, dataset=view) for view in views(source.ingredient.dataset, self.buckets)
            )
        return tuple(source.ingredient for source in self.all)

    @property
    def rows(self) -> int:
        """Rows of an epoch, all samples of a mixture included."""
        return mixture_of(tuple(source.ingredient for source in self.all)).rows

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of them."""
        first, *others = (source.lineage for source in self.all)
        return {"dataset": first, **({"datasets": others} if others else {})}


def open_sources(config: TrainConfig, *, write: bool = False, newest: bool = False) -> Sources:
    """Open what is to be read, in the versions that the run has noted or in the `newest`.

    With `write` the run keeps what it reads: the list of what is plain files, the versions of datasets.
    """
    sources = Sources(tuple(_opened(config, write=write, newest=newest)))
    for source, uri in zip(sources.all, uris_of(config), strict=True):
        refuse_embeddings(config, source.ingredient.dataset, uri)
    bucketed = [source for source in sources.all if source.ingredient.dataset.shapes]
    if not bucketed:
        return sources
    if len(sources.all) > 1:
        uri = bucketed[0].ingredient.dataset.files.uri_of("")
        raise DatasetError(
            f"source.also: expected [], as the crops of {uri} have several shapes (transform.crop: buckets), and only "
            "squares can be mixed; process all alike, or train on one"
        )
    run = open_storage(config.output.uri, config.storage.options())
    return replace(sources, buckets=count_buckets(sources.all[0].ingredient.dataset, run, 0, write=write))


def stored_empty(sources: Sources) -> NDArray[np.float16] | None:
    """Return the empty caption's embedding, where the first dataset was written with one."""
    dataset = sources.all[0].dataset
    if dataset is None or not dataset.storage.exists(EMPTY_TEXT):
        return None
    values: NDArray[np.float16] = np.load(io.BytesIO(dataset.storage.read(EMPTY_TEXT)), allow_pickle=False)
    return values


def embedded(config: TrainConfig) -> bool:
    """Return whether captions reach trainers as embeddings; of latents that cannot be read, what is configured."""
    with suppress(SdpError):
        if config.data.mode == "offline":
            return open_sources(config).all[0].ingredient.dataset.text.name == TEXT
    return config.text_encoded


def uris_of(config: TrainConfig) -> list[str]:
    """Of all datasets, in the order of their address ranges."""
    return [config.source.uri, *(other.uri for other in config.source.also)]


def _opened(config: TrainConfig, *, write: bool, newest: bool) -> Iterator[Source]:
    run = open_storage(config.output.uri, config.storage.options())
    told: list[tuple[str, float, ColumnsConfig]] = [(config.source.uri, 1.0, config.source.columns)]
    told += [(other.uri, other.weight, other.columns) for other in config.source.also]
    for number, (uri, weight, columns) in enumerate(told):
        limit = config.limit if number == 0 else None
        if columns.latents is not None and not _is_ours(uri, config):
            yield _plain(config, run, number, uri, weight, columns, write=write)
            continue
        dataset = open_pinned(config, number, uri, "latents", newest=newest, write=write)
        latents = open_latents(dataset, config.data.resolution, limit, columns)
        weighing = partial(_weighed, dataset.storage, config.data.holdout, limit)
        yield Source(Ingredient(latents, weight, weighing), dataset.lineage, dataset)


def _plain(
    config: TrainConfig, run: Storage, number: int, uri: str, weight: float, columns: ColumnsConfig, *, write: bool
) -> Source:
    options = config.storage.options()
    limit = config.limit if number == 0 else None
    listing = freeze(run, number, uri, options, write=write)
    latents = open_plain(listing, uri, options, config.data.resolution, columns, limit)
    digest = hashlib.sha256(repr(listing.to_pylist()).encode()).hexdigest()
    lineage = {"uri": uri, "files": listing.num_rows, "files_digest": digest}
    weighing = partial(RowWeights, config.data.holdout, limit)
    return Source(Ingredient(latents, weight, weighing), lineage, None)


def _is_ours(uri: str, config: TrainConfig) -> bool:
    """Whether sdp has written what is there."""
    if is_read_only(uri) or "*" in uri:
        return False
    return open_storage(uri, config.storage.options()).exists(HEAD)


def _weighed(storage: Storage, holdout: float, limit: int | None) -> Weigh:
    return row_weights(storage, holdout, limit)
