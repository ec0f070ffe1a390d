"""What a worker does with a piece or a unit; the cluster's side of it is `job`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.outcomes import Outcome
from sdp.datasets.parts import PartInfo, write_part
from sdp.datasets.repeated import REASON, Repeated
from sdp.datasets.units import Work
from sdp.encode import table
from sdp.encode.chunk import Chunk, SourceRow, TransformStats
from sdp.encode.reading import Columns, Piece, read_piece
from sdp.encode.recipe import Recipe, Settings
from sdp.encode.table import Shape
from sdp.encode.transform import SandboxedCrops, Transform
from sdp.model import load, sources
from sdp.model.sources import ModelSource
from sdp.storage import Storage, StorageOptions

if TYPE_CHECKING:
    from sdp.encode.encoder import Encoder

TRIES = 2
"""Deaths of a piece after which it is not tried again."""
Rows = tuple[pa.Table, list[Outcome]]
"""What a piece comes to: rows to store, and the outcomes of the others."""


@dataclass(frozen=True)
class Orders:
    """What every worker is told."""

    model: ModelSource
    """With the digest that it must have, so that no worker encodes with another model."""
    recipe: Recipe
    settings: Settings
    shape: Shape
    columns: Columns
    storage: StorageOptions
    output: Storage
    taken_down: bytes = b""
    """A bitmap of the addresses on takedown lists."""
    repeated: Repeated | None = None
    """The source's rows whose content a lower one has."""
    foreign: bool = True
    """Whether the images have not been decoded by `sdp download`, and so are by none but sandboxed decoders."""


@dataclass(frozen=True)
class Encoding:
    """The pipeline's stages for pieces of a dataset. An item is a piece and, of its rows, those to encode (or None)."""

    orders: Orders

    def transform(self, item: "tuple[Piece, NDArray[np.int64] | None]") -> tuple[Chunk, TransformStats]:
        """Read a piece and make crops and tokens of it."""
        return transform_piece(self.orders, *item)

    def load(self) -> "Encoder":
        """Load the encoder; where captions are embedded, store the empty caption's embedding."""
        orders = self.orders
        encoder = load_encoder(orders)
        if orders.shape.text_width is not None and not orders.output.exists(table.EMPTY_TEXT):
            orders.output.publish(table.EMPTY_TEXT, table.npy_bytes(embed_empty(orders, encoder)))
        return encoder

    def encode(self, encoder: "Encoder", chunk: Chunk) -> Rows:
        """Encode a chunk."""
        return encode_chunk(self.orders, encoder, chunk)


def transform_piece(orders: Orders, piece: Piece, only: NDArray[np.int64] | None) -> tuple[Chunk, TransformStats]:
    """Read a piece of the source and make crops and tokens of it."""
    transform = _transform(orders)
    began = time.perf_counter()
    source = _Timed(read_piece(piece, orders.columns, options=orders.storage, only=only))
    chunk = transform(source)
    seconds = time.perf_counter() - began
    return chunk, TransformStats(len(chunk), seconds - source.seconds, source.seconds)


def load_encoder(orders: Orders, device: str | None = None) -> "Encoder":
    """The encoder, with the model that was checked."""
    from sdp.encode.encoder import Encoder  # torch: not for those who only transform

    model = sources.resolve(orders.model, storage=orders.storage)
    text = load.load_text_encoder(model.path) if orders.shape.text_width is not None else None
    return Encoder(load.load_vae(model.path), orders.settings, text_encoder=text, device=device)


def embed_empty(orders: Orders, encoder: "Encoder") -> NDArray[np.float16]:
    """The embedding of the empty caption: what caption dropout puts in the place of a caption."""
    model = sources.resolve(orders.model, storage=orders.storage)
    return encoder.embed(load.tokenize(load.load_tokenizer(model.path), [""]))


def encode_chunk(orders: Orders, encoder: "Encoder", chunk: Chunk) -> Rows:
    """A chunk's rows, ready to be stored."""
    encoded = encoder(chunk)
    return table.rows_of(encoded, orders.shape), encoded.outcomes


def nothing(orders: Orders, outcomes: Sequence[Outcome]) -> Rows:
    """No rows, and why."""
    return table.schema(orders.shape).empty_table(), list(outcomes)


def write_unit(orders: Orders, kind: str, work: Work, pieces: Sequence[Rows], retried: Mapping[str, int]) -> PartInfo:
    """Publish the part of a unit."""
    rows, account = table.assemble(pieces, orders.shape)
    return write_part(orders.output, kind, work, rows, account, layout=table.LAYOUT, retried=retried)


class _Timed:
    """Rows, and how long they had to be waited for."""

    def __init__(self, rows: Iterator[SourceRow]) -> None:
        self._rows = rows
        self.seconds = 0.0

    def __iter__(self) -> Iterator[SourceRow]:
        return self

    def __next__(self) -> SourceRow:
        began = time.perf_counter()
        try:
            return next(self._rows)
        finally:
            self.seconds += time.perf_counter() - began


def _transform(orders: Orders) -> Transform:
    tokenizer = _tokenizer(orders.model, orders.storage)
    taken_down = BitMap64.deserialize(orders.taken_down) if orders.taken_down else BitMap64()

    def left_out(row: int) -> str | None:
        if row in taken_down:
            return "tombstone"
        return REASON if orders.repeated is not None and row in orders.repeated else None

    return Transform(orders.recipe, tokenizer, left_out, _sandboxed_crops(orders.recipe) if orders.foreign else None)


@lru_cache(maxsize=1)
def _sandboxed_crops(recipe: Recipe) -> SandboxedCrops:
    """Started once a process: a decoder takes longer to start than a piece."""
    return SandboxedCrops(recipe)


@lru_cache(maxsize=1)
def _tokenizer(model: ModelSource, storage: StorageOptions) -> Any:
    """Loaded once a process: it takes longer than a piece."""
    return load.load_tokenizer(sources.resolve(model, storage=storage).path)
