"""A latents dataset, as training reads it: its row groups, and their bytes as arrays."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sdp.config import TrainConfig
from sdp.config.train import ColumnsConfig
from sdp.datasets.manifest import Dataset
from sdp.errors import DatasetError, one_line
from sdp.model.family import TOKEN_DTYPE, TOKENS, latent_shape
from sdp.model.sources import LocalModel
from sdp.train.data.order import Blocks, Ints, Piece

if TYPE_CHECKING:
    import torch

TOKEN_IDS, TEXT = "token_ids", "text_embedding"
LATENTS, MOMENTS = "latents_", "moments_"
"""A latent that was drawn once, or the mean and log-variance to draw a new one from each time."""
BUCKET = "bucket"
"""Which of several shapes a row's crop has."""

Items = NDArray[np.void]
"""Rows × choices: of each row one array's bytes, or several to choose from."""


@dataclass(frozen=True, slots=True)
class Column:
    """What is read for each row: an array of this shape."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def numbers(self) -> int:
        return int(np.prod(self.shape))

    @property
    def width(self) -> int:
        return self.numbers * self.dtype.itemsize

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch  # (here: who reads for others needs none, and its start is a second)

        return torch.from_numpy(np.empty(0, self.dtype)).dtype


@dataclass(frozen=True, slots=True)
class Stored:
    """How a file has it: as bytes that are taken as they are, or as lists of numbers, to be multiplied."""

    name: str
    choices: int = 1
    """Arrays a row."""
    factor: float | None = None
    """Of numbers; None where they are bytes."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of which each row's bucket names one, where the bytes of rows differ in length."""

    def items(self, data: pa.ChunkedArray, column: Column) -> list[Items]:
        """The column's arrays chunk by chunk; bytes where they lie."""
        kind = np.dtype((np.void, column.width))
        if self.factor is not None:
            return [_converted(chunk, column, self.factor).view(kind).reshape(-1, 1) for chunk in data.chunks]
        arrays = []
        for chunk in data.chunks:
            if self.shapes:
                arrays.append(_equal_items(chunk, column).view(kind).reshape(-1, 1))
                continue
            values = np.frombuffer(chunk.buffers()[1], dtype=kind)
            first, last = chunk.offset * self.choices, (chunk.offset + len(chunk)) * self.choices
            arrays.append(values[first:last].reshape(-1, self.choices))
        return arrays


class Files(Protocol):
    """Where files are: a storage is that, and so is a source of plain ones."""

    def open(self, path: str) -> pa.NativeFile: ...

    def uri_of(self, path: str) -> str: ...


@dataclass(frozen=True)
class LatentsDataset:
    """The row groups of a latents dataset at one resolution."""

    files: Files
    paths: tuple[str, ...]
    blocks: Blocks
    latents: Column
    text: Column
    stored_latents: Stored
    stored_text: tuple[Stored, ...]
    """Captions to choose from are in one column or in several."""
    low: Ints
    high: Ints
    """The addresses of each row group's rows are in [low, high)."""
    addressed: bool = True
    """A column tells them; else they begin with `low` and follow one another."""
    bucket: int | None = None
    """Of crops of several shapes the one whose rows these are; `blocks` counts them alone."""

    @property
    def rows(self) -> int:
        return int(self.blocks.rows.sum())

    @property
    def columns(self) -> tuple[Column, Column]:
        return self.latents, self.text

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of crops that keep their aspect; none where all are square."""
        return self.stored_latents.shapes


def open_latents(
    dataset: Dataset, resolution: int, limit: int | None = None, columns: ColumnsConfig | None = None
) -> LatentsDataset:
    """A dataset of ours at a resolution; a line that says what there is where there is no such one.

    With a limit, parts that lie wholly beyond it are left out.
    """
    parts = dataset.parts.filter(pc.field("written") > 0)
    if limit is not None:
        parts = parts.filter(pc.field("start") < limit)
    uri = dataset.storage.uri
    if not parts.num_rows:
        raise DatasetError(f"{uri}: no row was written into it; nothing to train on")
    paths = tuple(parts["path"].to_pylist())
    blocks = Blocks.listed(parts["row_groups"])
    if np.any(np.bincount(blocks.part, blocks.rows, len(paths)) > parts["written"].to_numpy()):
        raise DatasetError(f"{uri}: several rows share an address, as transform.crops once allowed; process it again")
    file = pq.ParquetFile(dataset.storage.open(paths[0]))
    found = find_columns(file, uri, resolution, columns or ColumnsConfig())
    low, high = (parts[name].to_numpy()[blocks.part] for name in ("start", "stop"))
    return LatentsDataset(dataset.storage, paths, blocks, *found, low, high)


def refuse_another_encoder(config: TrainConfig, dataset: Dataset, model: LocalModel) -> None:
    """Latents of another VAE are noise to this model, and token ids of another tokenizer are other words."""
    name, _, digest = dataset.manifest.models.get("encoder", "").partition(" sha256:")
    if digest and digest != model.digest and not config.data.trust_encoder:
        raise DatasetError(
            f"model.source: expected {name} ({digest[:12]}…), which made the latents of {dataset.storage.uri}, got "
            f"{model.source} ({model.digest[:12]}…); take that, or set data.trust_encoder if VAE and text encoder agree"
        )


def refuse_embeddings(config: TrainConfig, latents: LatentsDataset, uri: str) -> None:
    """Refuse captions that are encoded already where the text encoder is trained."""
    if config.model.train_text_encoder and latents.text.name == TEXT:
        raise DatasetError(
            f"model.train_text_encoder: expected token ids, got embeddings in {uri}: they do not change with the text "
            "encoder; process it with encode.text: token_ids, or set it to false"
        )


# --- columns ---------------------------------------------------------------------------------------------------------


def find_columns(
    file: pq.ParquetFile, uri: str, resolution: int, columns: ColumnsConfig
) -> tuple[Column, Column, Stored, tuple[Stored, ...]]:
    """What one file says of latents and text, and so all of them."""
    schema = file.schema_arrow
    latents, stored = _find_latents(file, schema, uri, resolution, columns)
    texts = [_find_text(file, name, uri) for name in _text_names(schema, uri, columns)]
    kinds = {(column.name, column.shape) for column, _ in texts}
    if len(kinds) > 1:
        told = " and ".join(f"{name} of shape {shape}" for name, shape in sorted(kinds))
        raise DatasetError(f"source.columns.text: {uri} has {told}; name columns of one kind")
    return latents, texts[0][0], stored, tuple(text for _, text in texts)


def _find_latents(
    file: pq.ParquetFile, schema: pa.Schema, uri: str, resolution: int, columns: ColumnsConfig
) -> tuple[Column, Stored]:
    if columns.latents is None:
        kinds = {f"{LATENTS}{resolution}", f"{MOMENTS}{resolution}"} & set(schema.names)
        if not kinds:
            sides = [n.partition("_")[2] for n in schema.names if n.startswith((LATENTS, MOMENTS))]
            raise DatasetError(
                f"data.resolution: expected one that {uri} has ({', '.join(sides) or 'none'}), got {resolution}; "
                "process the images at it"
            )
        (name,) = kinds
    else:
        name = columns.latents.replace("{resolution}", str(resolution))
    field = _field(schema, name, uri, "source.columns.latents")
    if pa.types.is_fixed_size_binary(field.type):
        return _described(field, uri)
    if pa.types.is_binary(field.type) and "bucket" in schema.names:
        return _described_buckets(field, uri)
    shape = latent_shape(resolution)
    column = Column(f"{LATENTS}{resolution}", shape, np.dtype(np.float16))
    count, of_kind = _numbers_a_row(file, field, uri)
    if count != column.numbers or of_kind != "f":
        what = "numbers" if of_kind == "f" else "whole numbers"
        raise DatasetError(
            f"source.columns.latents: expected {column.numbers} numbers a row, {shape} at data.resolution "
            f"{resolution}, got {count} {what} in {name} of {uri}; name the column of that resolution"
        )
    stored = Stored(name, factor=columns.factor or 1.0)
    if columns.factor is None:
        _refuse_unscaled(file, column, stored, uri)
    return column, stored


def _refuse_unscaled(file: pq.ParquetFile, column: Column, stored: Stored, uri: str) -> None:
    """What a VAE gives has about five times the deviation that the U-Net is made for."""
    if not file.metadata.num_rows:
        return
    table = file.read_row_group(_first_group(file), columns=[stored.name])
    some = np.concatenate(stored.items(table[stored.name].slice(0, 256), column)).view(column.dtype)
    deviation = float(np.std(some.astype(np.float32)))
    if deviation > 3:
        raise DatasetError(
            f"source.columns.factor: {stored.name} of {uri} has a deviation of {deviation:.1f}, which looks unscaled; "
            "set it to 0.18215, or to 1 if the latents are to be taken as they are"
        )


def _text_names(schema: pa.Schema, uri: str, columns: ColumnsConfig) -> tuple[str, ...]:
    if columns.text:
        return columns.text
    name = TOKEN_IDS if TOKEN_IDS in schema.names else TEXT
    if name not in schema.names:
        raise DatasetError(f"{uri}: neither {TOKEN_IDS} nor {TEXT} in it; process it with captions")
    return (name,)


def _find_text(file: pq.ParquetFile, name: str, uri: str) -> tuple[Column, Stored]:
    """Token ids or embeddings; of one caption, or of several in a row."""
    field = _field(file.schema_arrow, name, uri, "source.columns.text")
    if pa.types.is_fixed_size_binary(field.type):
        column, stored = _described(field, uri)
        kind = TOKEN_IDS if column.dtype.kind in "ui" else TEXT
        own = 1 if kind == TOKEN_IDS else 2
        choices, shape = int(np.prod(column.shape[:-own])), column.shape[-own:]
        if shape[0] == TOKENS:
            return Column(kind, shape, column.dtype), Stored(stored.name, choices)
        count = column.numbers
    else:
        count, of_kind = _numbers_a_row(file, field, uri)
        if of_kind == "i" and count == TOKENS:
            return Column(TOKEN_IDS, (TOKENS,), np.dtype(TOKEN_DTYPE)), Stored(field.name, factor=1.0)
        if of_kind == "f" and count and count % TOKENS == 0:
            return Column(TEXT, (TOKENS, count // TOKENS), np.dtype(np.float16)), Stored(field.name, factor=1.0)
    raise DatasetError(
        f"source.columns.text: expected {TOKENS} token ids or {TOKENS} × width numbers a row, got {count} in "
        f"{field.name} of {uri}; name another column"
    )


def _field(schema: pa.Schema, name: str, uri: str, key: str) -> pa.Field:
    if name not in schema.names:
        raise DatasetError(f"{key}: no column {name} in {uri}; it has {', '.join(schema.names)}")
    return schema.field(name)


def _described(field: pa.Field, uri: str) -> tuple[Column, Stored]:
    """A column of bytes that says of itself what they are, as ours do."""
    metadata = field.metadata or {}
    try:
        column = Column(field.name, tuple(json.loads(metadata[b"shape"])), np.dtype(metadata[b"dtype"].decode()))
    except (KeyError, ValueError, TypeError) as error:
        raise DatasetError(f"{uri}: column {field.name} does not say its shape and dtype ({error})") from error
    if field.type.byte_width != column.width:
        raise DatasetError(f"{uri}: column {field.name} is {field.type}, expected {column.width} bytes a row")
    return column, Stored(field.name)


def _described_buckets(field: pa.Field, uri: str) -> tuple[Column, Stored]:
    """A column of crops that keep their aspect; the column is described by the largest."""
    metadata = field.metadata or {}
    try:
        shapes = tuple(tuple(map(int, shape)) for shape in json.loads(metadata[b"shapes"]))
        column = Column(field.name, max(shapes, key=np.prod), np.dtype(metadata[b"dtype"].decode()))
    except (KeyError, ValueError, TypeError) as error:
        raise DatasetError(f"{uri}: column {field.name} does not say its shapes and dtype ({error})") from error
    return column, Stored(field.name, shapes=shapes)


def _numbers_a_row(file: pq.ParquetFile, field: pa.Field, uri: str) -> tuple[int, str]:
    """How many numbers the first row has in a column of lists, and whether they are fractions (f) or whole (i)."""
    try:
        table = file.read_row_group(_first_group(file), columns=[field.name]) if file.metadata.num_rows else None
        values = _flat(table[field.name].chunk(0).slice(0, 1)) if table is not None else None
    except (pa.ArrowException, TypeError) as error:
        raise DatasetError(
            f"{uri}: column {field.name} is {field.type}, expected bytes, lists or tensors of numbers ({error})"
        ) from error
    if values is None:
        return 0, "f"
    return len(values), "i" if pa.types.is_integer(values.type) else "f"


def _first_group(file: pq.ParquetFile) -> int:
    return next(n for n in range(file.num_row_groups) if file.metadata.row_group(n).num_rows)


def _flat(array: pa.Array) -> pa.Array:
    """All numbers of an array of lists, however deep, or of tensors."""
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif (
            pa.types.is_list(array.type)
            or pa.types.is_large_list(array.type)
            or pa.types.is_fixed_size_list(array.type)
        ):
            array = array.flatten()
        elif pa.types.is_floating(array.type) or pa.types.is_integer(array.type):
            return array
        else:
            raise TypeError(f"{array.type} inside")


def _converted(array: pa.Array, column: Column, factor: float) -> NDArray[np.generic]:
    """Lists of numbers as rows of the column's own kind."""
    values = _flat(array)
    if values.null_count or len(values) != len(array) * column.numbers or not _equally_long(array, column):
        raise DatasetError(f"not {column.numbers} numbers in each row")
    numbers = values.to_numpy(zero_copy_only=False).reshape(len(array), column.numbers)
    if factor != 1:
        numbers = numbers.astype(np.float32) * np.float32(factor)
    return np.ascontiguousarray(numbers.astype(column.dtype, copy=False))


def _equal_items(array: pa.Array, column: Column) -> NDArray[np.uint8]:
    """The bytes of an array whose rows are all as long as the column's."""
    _, offsets, values = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    if np.any(np.diff(ends) != column.width):
        raise DatasetError(f"not {column.width} bytes in each row of {column.shape}")
    data = np.frombuffer(values, np.uint8) if values is not None else np.zeros(0, np.uint8)
    return data[ends[0] : ends[-1]] if len(ends) else data[:0]


def _equally_long(array: pa.Array, column: Column) -> bool:
    """Whether each row has as many; deeper lists are taken at their sum."""
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if array.null_count:
        return False
    if pa.types.is_fixed_size_list(array.type) or pa.types.is_nested(array.type.value_type):
        return True
    return bool(pc.all(pc.equal(pc.list_value_length(array), column.numbers)).as_py())


# --- reading ---------------------------------------------------------------------------------------------------------


class GroupReader:
    """Reads pieces of row groups; safe to use from several threads."""

    def __init__(self, dataset: LatentsDataset, verify: bool = True, footers: int = 256) -> None:
        self.dataset = dataset
        self._verify = verify
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._keep = footers
        self._lock = Lock()

    def read(self, piece: Piece) -> tuple[Ints, list[list[Items]]]:
        """The addresses of a piece's rows, and the items of latents and of each column of text, chunk by chunk."""
        data = self.dataset
        kinds = [(data.stored_latents, data.latents), *((stored, data.text) for stored in data.stored_text)]
        table = self._table(piece, [stored.name for stored, _ in kinds])
        try:
            return self._addresses(piece, table), [stored.items(table[stored.name], kind) for stored, kind in kinds]
        except (DatasetError, TypeError, pa.ArrowException) as error:
            path = data.paths[int(data.blocks.part[piece.block])]
            group = int(data.blocks.group[piece.block])
            raise DatasetError(f"{data.files.uri_of(path)}: row group {group}: {error}; mend the file") from error

    def buckets(self, block: int) -> NDArray[np.int16]:
        """The bucket of each row of a row group."""
        whole = Piece(block, 0, int(self.dataset.blocks.rows[block]))
        values: NDArray[np.int16] = self._table(whole, [BUCKET])[BUCKET].to_numpy()
        return values

    def addresses(self, piece: Piece) -> Ints:
        """Those of a piece's rows alone."""
        return self._addresses(piece, self._table(piece, []) if self.dataset.addressed else None)

    def _addresses(self, piece: Piece, table: pa.Table | None) -> Ints:
        if not self.dataset.addressed or table is None:
            first = int(self.dataset.low[piece.block])
            return np.arange(first + piece.start, first + piece.stop)
        rows: Ints = table["row"].to_numpy()
        return rows

    def _table(self, piece: Piece, names: list[str]) -> pa.Table:
        data = self.dataset
        path = data.paths[int(data.blocks.part[piece.block])]
        group = int(data.blocks.group[piece.block])
        names = ["row", *names] if data.addressed else names
        names = [*names, BUCKET] if data.bucket is not None else names
        try:
            table = self._open(path).read_row_group(group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            cause = one_line(error, 160)
            raise DatasetError(f"{data.files.uri_of(path)}: corrupt row group {group} ({cause})") from error
        if data.bucket is not None:
            table = table.filter(pc.equal(table[BUCKET], data.bucket))
        if table.num_rows != data.blocks.rows[piece.block]:
            raise DatasetError(f"{data.files.uri_of(path)}: another file than the manifest lists; run process again")
        return table.slice(piece.start, len(piece))

    def _open(self, path: str) -> pq.ParquetFile:
        with self._lock:
            footer = self._footers.get(path)
        file = pq.ParquetFile(
            self.dataset.files.open(path), metadata=footer, pre_buffer=True, page_checksum_verification=self._verify
        )
        if footer is None:
            with self._lock:
                self._footers[path] = file.metadata
                if len(self._footers) > self._keep:
                    self._footers.popitem(last=False)
        return file
