"""The work on one piece or unit, as plain functions; `pipeline` and the stages' `job` run them on a cluster."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.outcomes import Outcome
from sdp.datasets.parts import Layout
from sdp.datasets.repeated import REASON, Repeated
from sdp.encode import table
from sdp.encode.chunk import Chunk, SourceRow, TransformStats
from sdp.encode.reading import Columns, Piece, read_piece
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.encode.table import RowShape
from sdp.encode.transform import SandboxedCrops, Transform
from sdp.model import load, sources
from sdp.model.layout import ModelSource
from sdp.storage import Storage, StorageOptions

if TYPE_CHECKING:
    from sdp.encode.encoder import Encoder

TRIES = 2
"""Worker deaths after which a piece is not retried."""
Rows = tuple[pa.Table, list[Outcome]]
"""A piece's result: rows to store, and the outcomes of the other addresses."""
Item = tuple[Piece, NDArray[np.int64] | None]
"""A piece, and its rows to encode (None: all)."""


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """The images that a job's workers read, and the output, as sent to every worker."""

    columns: Columns
    storage: StorageOptions
    output: Storage
    taken_down: bytes = b""
    """Addresses on takedown lists, as a serialised bitmap."""
    repeated: Repeated | None = None
    """Rows of the source that repeat the content of a lower row."""
    foreign: bool = True
    """True if only sandboxed decoders may read the images: `sdp download` has not checked them."""


@dataclass(frozen=True, kw_only=True)
class RowsSpec(SourceSpec):
    """The settings of any job's transforms and encoders."""

    recipe: Recipe
    settings: EncoderSettings


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(RowsSpec):
    """The settings of transforms and encoders that make latents."""

    model: ModelSource
    """Pinned by its digest, so that no worker encodes with another model."""
    shape: RowShape


@dataclass(frozen=True)
class Encoding:
    """The pipeline's stages for pieces of a dataset."""

    spec: EncodeSpec
    kind: ClassVar[str] = "latents"
    layout: ClassVar[Layout] = table.LAYOUT

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows that it makes."""
        return table.schema(self.spec.shape)

    def transform(self, item: Item) -> tuple[Chunk, TransformStats]:
        """Read a piece and return its crops and tokens."""
        return transform_piece(self.spec, *item)

    def load(self) -> "Encoder":
        """Load the encoder; where captions are embedded, store the empty caption's embedding."""
        spec = self.spec
        encoder = load_encoder(spec)
        if spec.shape.text_width is not None and not spec.output.exists(table.EMPTY_TEXT):
            spec.output.publish(table.EMPTY_TEXT, table.npy_bytes(embed_empty(spec, encoder)))
        return encoder

    def encode(self, encoder: "Encoder", chunk: Chunk) -> Rows:
        """Encode a chunk."""
        return encode_chunk(self.spec, encoder, chunk)


def transform_piece(spec: EncodeSpec, piece: Piece, only: NDArray[np.int64] | None) -> tuple[Chunk, TransformStats]:
    """Read a piece of the source and return its crops and tokens."""
    tokenizer = _tokenizer(spec.model, spec.storage)
    crops = _sandboxed_crops(spec.recipe) if spec.foreign else None
    return run_transform(Transform(spec.recipe, tokenizer, reason_to_skip(spec), crops), spec, piece, only)


def run_transform(
    transform: Transform, spec: RowsSpec, piece: Piece, only: NDArray[np.int64] | None
) -> tuple[Chunk, TransformStats]:
    """Read a piece of the source and transform its rows."""
    began = time.perf_counter()
    source = _TimedRows(read_piece(piece, spec.columns, options=spec.storage, only=only, seed=spec.recipe.seed))
    chunk = transform(source)
    seconds = time.perf_counter() - began
    return chunk, TransformStats(len(chunk), seconds - source.seconds, source.seconds)


def load_encoder(spec: EncodeSpec, device: str | None = None) -> "Encoder":
    """Load the encoder, with the model of the pinned digest."""
    from sdp.encode.encoder import Encoder  # imports torch, which transforms do not need

    model = sources.resolve(spec.model, storage=spec.storage)
    text = load.load_text_encoder(model.path) if spec.shape.text_width is not None else None
    return Encoder(load.load_vae(model.path), spec.settings, text_encoder=text, device=device)


def embed_empty(spec: EncodeSpec, encoder: "Encoder") -> NDArray[np.float16]:
    """Return the embedding of the empty caption, which caption dropout puts in place of a caption."""
    model = sources.resolve(spec.model, storage=spec.storage)
    return encoder.embed(load.tokenize(load.load_tokenizer(model.path), [""]))


def encode_chunk(spec: EncodeSpec, encoder: "Encoder", chunk: Chunk) -> Rows:
    """Encode a chunk; return its rows, ready to be stored."""
    encoded = encoder(chunk)
    return table.rows_of(encoded, spec.shape), encoded.outcomes


class _TimedRows:
    """Rows, and the time spent waiting for them."""

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


def reason_to_skip(spec: SourceSpec) -> Callable[[int], str | None]:
    """Return the function that says why an address is left out, if it is."""
    taken_down = BitMap64.deserialize(spec.taken_down) if spec.taken_down else BitMap64()

    def reason(row: int) -> str | None:
        if row in taken_down:
            return "tombstone"
        return REASON if spec.repeated is not None and row in spec.repeated else None

    return reason


@lru_cache(maxsize=1)
def _sandboxed_crops(recipe: Recipe) -> SandboxedCrops:
    """Start the decoders, once per process: starting takes longer than a piece."""
    return SandboxedCrops(recipe)


@lru_cache(maxsize=1)
def _tokenizer(model: ModelSource, storage: StorageOptions) -> Any:
    """Load the tokenizer, once per process: loading takes longer than a piece."""
    return load.load_tokenizer(sources.resolve(model, storage=storage).path)
