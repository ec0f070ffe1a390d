"""The latents datasets of a run: source.uri, and those that are mixed in."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sdp.config.train import MixedSource, TrainConfig
from sdp.datasets.output import HEAD
from sdp.errors import DatasetError, SdpError
from sdp.storage import is_read_only, open_storage
from sdp.train.data.columns import TEXT
from sdp.train.data.granules import GranulePlan, count_buckets, views
from sdp.train.data.latents import WeightedDataset, open_latents, refuse_embeddings
from sdp.train.data.mixture import MixturePlan
from sdp.train.data.order import Ints, Shuffle
from sdp.train.data.pinned import open_pinned
from sdp.train.data.plain import freeze, open_plain
from sdp.train.data.weights import RowWeights, Weigh, row_weights


@dataclass(frozen=True)
class Sources:
    """All datasets of a run, source.uri first."""

    all: tuple[WeightedDataset, ...]
    buckets: Ints | None = None
    """The rows of each row group (line) and bucket (column), if crops have several shapes."""

    @property
    def datasets(self) -> tuple[WeightedDataset, ...]:
        """The datasets for a reader, or the views of the one dataset's buckets."""
        if self.buckets is not None:
            (source,) = self.all
            return tuple(replace(source, dataset=view) for view in views(source.dataset, self.buckets))
        return self.all

    def plan(self, config: TrainConfig) -> MixturePlan | GranulePlan:
        """Return the rows of each step."""
        groups = tuple(source.dataset.row_groups for source in self.datasets)
        if self.buckets is not None:
            return GranulePlan(groups, config.seed, Shuffle(), config.data.batch_size)
        return MixturePlan(groups, config.seed, Shuffle(), tuple(source.weight for source in self.all))

    @property
    def metadata(self) -> dict[str, Any]:
        """The datasets' lineage, for checkpoints."""
        first, *others = (source.lineage for source in self.all)
        return {"dataset": first, **({"datasets": others} if others else {})}


def open_sources(config: TrainConfig, *, write: Callable[[], None] | None = None, newest: bool = False) -> Sources:
    """Open the run's datasets, in the pinned versions or in the `newest`.

    With `write`, which is the lease's check of the driver, the run's folder keeps what it reads: the versions of
    datasets, the list of plain files, and the counts of shapes.
    """
    sources = Sources(tuple(_open_sources(config, write=write, newest=newest)))
    for source, uri in zip(sources.all, uris_of(config), strict=True):
        refuse_embeddings(config, source.dataset, uri)
    bucketed = [source for source in sources.all if source.dataset.shapes]
    if not bucketed:
        for other in sources.all[1:]:
            refuse_another_kind(sources.all[0], other)
        return sources
    if len(sources.all) > 1:
        uri = bucketed[0].dataset.files.uri_of("")
        raise DatasetError(
            f"source.also: expected [] since the crops of {uri} have several shapes (transform.crop: buckets); process "
            "all datasets with square crops, or train on one"
        )
    run = open_storage(config.output.uri, config.storage.options())
    return replace(sources, buckets=count_buckets(sources.all[0].dataset, run, write=write is not None))


def refuse_another_kind(first: WeightedDataset, other: WeightedDataset) -> None:
    """Raise a DatasetError if two datasets of a mixture have other columns."""
    for one, another in zip(first.dataset.columns, other.dataset.columns, strict=True):
        if (one.name, one.shape, one.dtype) != (another.name, another.shape, another.dtype):
            raise DatasetError(
                f"source.also: expected {one.name} of {one.dtype} {one.shape} as {first.dataset.files.uri_of('')} has "
                f"it, got {another.name} of {another.dtype} {another.shape} in {other.dataset.files.uri_of('')}; "
                "process both alike"
            )


def embedded(config: TrainConfig) -> bool:
    """Return whether captions reach the trainers as embeddings; if latents cannot be read, as configured."""
    with suppress(SdpError):
        if config.data.mode == "offline":
            return open_sources(config).all[0].dataset.text.name == TEXT
    return config.text_encoded


def uris_of(config: TrainConfig) -> list[str]:
    """Return the URIs of all datasets, in the order of their address ranges."""
    return [config.source.uri, *(other.uri for other in config.source.also)]


def _open_sources(config: TrainConfig, *, write: Callable[[], None] | None, newest: bool) -> Iterator[WeightedDataset]:
    run = open_storage(config.output.uri, config.storage.options())
    options, resolution, holdout = config.storage.options(), config.data.resolution, config.data.holdout
    first = MixedSource(uri=config.source.uri, weight=1.0, columns=config.source.columns)
    for number, source in enumerate([first, *config.source.also]):
        uri, weight, columns = source.uri, source.weight, source.columns
        limit = config.limit if number == 0 else None
        if columns.latents is None or _has_manifest(uri, config):
            dataset = open_pinned(config, number, uri, "latents", newest=newest, write=write)
            latents = open_latents(dataset, resolution, limit, columns)
            load_weights: Callable[[], Weigh] = partial(row_weights, dataset.storage, holdout, limit)
            yield WeightedDataset(latents, weight, load_weights, dataset.lineage, dataset)
        else:
            listing = freeze(run, number, uri, options, write=write is not None)
            latents = open_plain(listing, uri, options, resolution, columns, limit)
            digest = hashlib.sha256(repr(listing.to_pylist()).encode()).hexdigest()
            lineage = {"uri": uri, "files": listing.num_rows, "files_digest": digest}
            yield WeightedDataset(latents, weight, partial(RowWeights, holdout, limit), lineage)


def _has_manifest(uri: str, config: TrainConfig) -> bool:
    """Return whether sdp wrote the dataset at a URI."""
    if is_read_only(uri) or "*" in uri:
        return False
    return open_storage(uri, config.storage.options()).exists(HEAD)
