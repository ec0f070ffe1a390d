"""A latents dataset, as training reads it: its row groups, and their bytes as arrays."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from sdp.config import TrainConfig
from sdp.datasets.manifest import Dataset
from sdp.errors import DatasetError
from sdp.model.sources import LocalModel
from sdp.storage import Storage
from sdp.train.data.order import Blocks, Piece

TOKEN_IDS, TEXT = "token_ids", "text_embedding"
LATENTS, MOMENTS = "latents_", "moments_"
"""A latent that was drawn once, or the mean and log-variance to draw a new one from each time."""


@dataclass(frozen=True, slots=True)
class Column:
    """A fixed-size binary column that holds one array a row."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def width(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.from_numpy(np.empty(0, self.dtype)).dtype

    def views(self, data: pa.ChunkedArray) -> list[NDArray[np.void]]:
        """The column's bytes where they lie, one item a row."""
        arrays = []
        for chunk in data.chunks:
            values = np.frombuffer(chunk.buffers()[1], dtype=np.dtype((np.void, self.width)))
            arrays.append(values[chunk.offset : chunk.offset + len(chunk)])
        return arrays


@dataclass(frozen=True)
class LatentsDataset:
    """The row groups of a complete latents dataset at one resolution."""

    storage: Storage
    digest: str
    paths: tuple[str, ...]
    blocks: Blocks
    latents: Column
    text: Column

    @property
    def rows(self) -> int:
        return int(self.blocks.rows.sum())

    @property
    def columns(self) -> tuple[Column, Column]:
        return self.latents, self.text


def open_latents(dataset: Dataset, resolution: int, limit: int | None = None) -> LatentsDataset:
    """The dataset at a resolution; a line that says what there is where there is no such one.

    With a limit, parts that lie wholly beyond it are left out.
    """
    parts = dataset.parts.filter(pc.field("written") > 0)
    if limit is not None:
        parts = parts.filter(pc.field("start") < limit)
    uri = dataset.storage.uri
    if not parts.num_rows:
        raise DatasetError(f"{uri}: no row was written into it; nothing to train on")
    paths = tuple(parts["path"].to_pylist())
    groups = [[group["rows"] for group in part] for part in parts["row_groups"].to_pylist()]
    schema = pq.read_schema(dataset.storage.open(paths[0]))
    kinds = {f"{LATENTS}{resolution}", f"{MOMENTS}{resolution}"} & set(schema.names)
    if not kinds:
        sides = [n.partition("_")[2] for n in schema.names if n.startswith((LATENTS, MOMENTS))]
        raise DatasetError(
            f"data.resolution: expected one that {uri} has ({', '.join(sides) or 'none'}), got {resolution}; "
            "process the images at it"
        )
    (name,) = kinds
    text = TOKEN_IDS if TOKEN_IDS in schema.names else TEXT
    if text not in schema.names:
        raise DatasetError(f"{uri}: neither {TOKEN_IDS} nor {TEXT} in it; process it with captions")
    columns = [_column(schema.field(n), uri) for n in (name, text)]
    return LatentsDataset(dataset.storage, dataset.digest, paths, Blocks.of(groups), *columns)


def refuse_another_encoder(config: TrainConfig, dataset: Dataset, model: LocalModel) -> None:
    """Latents of another VAE are noise to this model, and token ids of another tokenizer are other words."""
    name, _, digest = dataset.manifest.models.get("encoder", "").partition(" sha256:")
    if digest and digest != model.digest and not config.data.trust_encoder:
        raise DatasetError(
            f"model.source: expected {name} ({digest[:12]}…), which made the latents of {dataset.storage.uri}, got "
            f"{model.source} ({model.digest[:12]}…); take that, or set data.trust_encoder if VAE and text encoder agree"
        )


def _column(field: pa.Field, uri: str) -> Column:
    metadata = field.metadata or {}
    try:
        column = Column(field.name, tuple(json.loads(metadata[b"shape"])), np.dtype(metadata[b"dtype"].decode()))
    except (KeyError, ValueError, TypeError) as error:
        raise DatasetError(f"{uri}: column {field.name} does not say its shape and dtype ({error})") from error
    if not pa.types.is_fixed_size_binary(field.type) or field.type.byte_width != column.width:
        raise DatasetError(f"{uri}: column {field.name} is {field.type}, expected {column.width} bytes a row")
    return column


class GroupReader:
    """Reads pieces of row groups; safe to use from several threads."""

    def __init__(self, dataset: LatentsDataset, verify: bool = True, footers: int = 256) -> None:
        self.dataset = dataset
        self._verify = verify
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._keep = footers
        self._lock = Lock()

    def read(self, piece: Piece) -> tuple[NDArray[np.int64], list[list[NDArray[np.void]]]]:
        """The addresses of a piece's rows, and its columns' bytes chunk by chunk."""
        data = self.dataset
        path = data.paths[int(data.blocks.part[piece.block])]
        group = int(data.blocks.group[piece.block])
        names = ["row", *(column.name for column in data.columns)]
        try:
            table = self._open(path).read_row_group(group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            cause = " ".join(str(error).split())[:160]
            raise DatasetError(f"{data.storage.uri_of(path)}: corrupt row group {group} ({cause})") from error
        if table.num_rows != data.blocks.rows[piece.block]:
            raise DatasetError(f"{data.storage.uri_of(path)}: another file than the manifest lists; run process again")
        table = table.slice(piece.start, len(piece))
        return table["row"].to_numpy(), [column.views(table[column.name]) for column in data.columns]

    def _open(self, path: str) -> pq.ParquetFile:
        with self._lock:
            footer = self._footers.get(path)
        file = pq.ParquetFile(
            self.dataset.storage.open(path), metadata=footer, pre_buffer=True, page_checksum_verification=self._verify
        )
        if footer is None:
            with self._lock:
                self._footers[path] = file.metadata
                if len(self._footers) > self._keep:
                    self._footers.popitem(last=False)
        return file


def scatter(pieces: Sequence[NDArray[np.void]], places: NDArray[np.int64], into: NDArray[np.void]) -> None:
    """Put each row of some chunks where it belongs."""
    at = 0
    for rows in pieces:
        into[places[at : at + len(rows)]] = rows
        at += len(rows)
