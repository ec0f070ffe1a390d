"""Latents datasets for training: opening them, and reading their row groups."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sdp.config.train import ColumnsConfig, TrainConfig
from sdp.datasets.columns import end_of, plain_footer
from sdp.datasets.manifest import Dataset
from sdp.datasets.pages import check_pages
from sdp.datasets.parts import reading
from sdp.errors import DatasetError, one_line
from sdp.model.sources import LocalModel
from sdp.train.data.columns import BUCKET, TEXT, Column, RowColumns, find_columns
from sdp.train.data.order import Ints, RowGroups, RowRange
from sdp.train.data.rows import Rows, empty_rows
from sdp.train.data.weights import RowWeights, Weigh

_FOOTERS = 256
"""Files whose footers a reader keeps."""


class Files(Protocol):
    """The place of a dataset's files: a storage, or plain files."""

    def open(self, path: str) -> pa.NativeFile: ...

    def uri_of(self, path: str) -> str: ...


@dataclass(frozen=True)
class LatentsDataset:
    """The row groups of a latents dataset at one resolution."""

    files: Files
    paths: tuple[str, ...]
    row_groups: RowGroups
    latents: Column
    text: Column
    low: Ints | None = None
    """The first address of each row group, from which addresses count up; None if a column has them."""
    bucket: int | None = None
    """The only bucket in this view of the dataset, if crops have several shapes."""

    @property
    def columns(self) -> RowColumns:
        return self.latents, self.text

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of crops, if there are several."""
        return self.latents.shapes

    def locate(self, row_group: int) -> tuple[str, int]:
        """Return the path of a row group's file, and its number within the file."""
        return self.paths[int(self.row_groups.part[row_group])], int(self.row_groups.group[row_group])


@dataclass(frozen=True)
class WeightedDataset:
    """A dataset of a run."""

    dataset: LatentsDataset
    weight: float = 1.0
    """Number of its samples for each sample of the first dataset."""
    load_weights: Callable[[], Weigh] = RowWeights
    """Returns the rows' weights; called at the beginning of each epoch."""
    lineage: Mapping[str, Any] = field(default_factory=dict)
    written: Dataset | None = None
    """The dataset as sdp wrote it; None for plain files."""


def open_latents(
    dataset: Dataset, resolution: int, limit: int | None = None, columns: ColumnsConfig | None = None
) -> LatentsDataset:
    """Open a dataset that sdp wrote, at a resolution. With a limit, parts wholly beyond it are left out."""
    uri = dataset.storage.uri
    parts, paths, groups = select_parts(dataset, limit)
    if np.any(np.bincount(groups.part, groups.rows, len(paths)) > parts["written"].to_numpy()):
        raise DatasetError(f"{uri}: several rows share an address, as transform.crops once allowed; process it again")
    with reading(dataset.storage, paths[0]):
        file = pq.ParquetFile(dataset.storage.open(paths[0]))
    kinds = find_columns(file, uri, resolution, columns or ColumnsConfig())
    return LatentsDataset(dataset.storage, paths, groups, *kinds)


def select_parts(dataset: Dataset, limit: int | None) -> tuple[pa.Table, tuple[str, ...], RowGroups]:
    """Return the parts that have rows below the limit, their paths, and their row groups."""
    parts = dataset.parts.filter(pc.field("written") > 0)
    if limit is not None:
        parts = parts.filter(pc.field("start") < limit)
    if not parts.num_rows:
        raise DatasetError(f"{dataset.storage.uri}: the dataset has no rows; nothing to train on")
    return parts, tuple(parts["path"].to_pylist()), RowGroups.listed(parts["row_groups"])


def refuse_another_encoder(
    config: TrainConfig, dataset: Dataset | None, latents: LatentsDataset, model: LocalModel
) -> None:
    """Refuse latents and captions that another model made, which mean nothing to this one.

    Plain files have no manifest, so `dataset` is None and only the width of embeddings is checked.
    """
    width = model.family.text(model.path, embedded=True).width
    if latents.text.name == TEXT and latents.text.shape[-1] != width:
        raise DatasetError(
            f"model.source: expected a text encoder of width {latents.text.shape[-1]}, which the captions of "
            f"{latents.files.uri_of('')} have, got {width} in {model.source}; use the model that encoded them"
        )
    name, _, digest = (dataset.manifest.models.get("encoder", "") if dataset else "").partition(" sha256:")
    if digest and digest not in (model.digest, model.encoder_digest) and not config.data.trust_encoder:
        raise DatasetError(
            f"model.source: expected {name} ({digest[:12]}…), which made the latents of {latents.files.uri_of('')}, "
            f"got {model.source} ({model.digest[:12]}…); use that model, or set data.trust_encoder if its VAE and text "
            "encoder are the same"
        )


def refuse_embeddings(config: TrainConfig, latents: LatentsDataset, uri: str) -> None:
    """Refuse captions that are stored as embeddings if the text encoder is trained."""
    if config.model.train_text_encoder and latents.text.name == TEXT:
        raise DatasetError(
            f"model.train_text_encoder: expected token ids, got embeddings in {uri}; process the images with "
            "encode.text: token_ids, or set it to false"
        )


class GroupReader:
    """Reads ranges of row groups; safe to use from several threads."""

    def __init__(self, dataset: LatentsDataset) -> None:
        self.dataset = dataset
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()

    def rows(self, row_group: int) -> Rows:
        """Return the rows of a row group, without their weights."""
        whole = self._all_rows(row_group)
        into = empty_rows(len(whole), self.dataset.columns)
        self.read([whole], into, np.arange(len(whole)))
        return into

    def read(self, ranges: Sequence[RowRange], into: Rows, places: Ints) -> None:
        """Read the rows of some ranges, without their weights; the n-th row of all goes to places[n] of `into`."""
        data = self.dataset
        for row_range in ranges:
            table = self._table(row_range, [column.stored for column in data.columns])
            own, places = np.split(places, [len(row_range)])
            try:
                into.rows[own] = self._addresses(row_range, table)
                for column, target in zip(data.columns, (into.latents, into.text), strict=True):
                    at = 0
                    for items in column.items(table[column.stored]):
                        target[own[at : at + len(items)]] = items
                        at += len(items)
            except (DatasetError, TypeError, pa.ArrowException) as error:
                path, group = data.locate(row_range.row_group)
                raise DatasetError(f"{data.files.uri_of(path)}: row group {group}: {error}; repair the file") from error

    def buckets(self, row_group: int) -> NDArray[np.int16]:
        """Return the bucket of each row of a row group."""
        values: NDArray[np.int16] = self._table(self._all_rows(row_group), [BUCKET])[BUCKET].to_numpy()
        return values

    def addresses(self, row_group: int) -> Ints:
        """Return the addresses of a row group, without reading its items."""
        whole = self._all_rows(row_group)
        return self._addresses(whole, self._table(whole, []) if self.dataset.low is None else None)

    def _addresses(self, row_range: RowRange, table: pa.Table | None) -> Ints:
        if self.dataset.low is not None:
            first = int(self.dataset.low[row_range.row_group])
            return np.arange(first + row_range.start, first + row_range.stop)
        assert table is not None, "it has the addresses"
        rows: Ints = table["row"].to_numpy()
        return rows

    def _all_rows(self, row_group: int) -> RowRange:
        return RowRange(row_group, 0, int(self.dataset.row_groups.rows[row_group]))

    def _table(self, row_range: RowRange, names: list[str]) -> pa.Table:
        data = self.dataset
        path, group = data.locate(row_range.row_group)
        names = ["row", *names] if data.low is None else names
        names = [*names, BUCKET] if data.bucket is not None else names
        try:
            table = self._open(path, group).read_row_group(group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            cause = one_line(error, 160)
            raise DatasetError(f"{data.files.uri_of(path)}: corrupt row group {group} ({cause})") from error
        if data.bucket is not None:
            table = table.filter(pc.equal(table[BUCKET], data.bucket))
        if missing := set(names) - set(table.column_names):
            raise DatasetError(f"{data.files.uri_of(path)}: no column {', '.join(sorted(missing))}; repair the file")
        if table.num_rows != data.row_groups.rows[row_range.row_group]:
            raise DatasetError(
                f"{data.files.uri_of(path)}: not the file that the manifest lists; run sdp process again"
            )
        return table.slice(row_range.start, len(row_range))

    def _open(self, path: str, group: int) -> pq.ParquetFile:
        files = self.dataset.files
        uri, source = files.uri_of(path), files.open(path)
        footer = self._footers.get(path) or plain_footer(uri, end_of(source)[0])
        checked = check_pages(uri, source, footer, [group], range(footer.num_columns))
        self._footers[path] = footer
        if len(self._footers) > _FOOTERS:
            self._footers.popitem(last=False)
        return pq.ParquetFile(checked, metadata=footer, pre_buffer=True, page_checksum_verification=True)
