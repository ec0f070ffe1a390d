"""The stages that make latents, which a runner takes pieces through."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.outcomes import Outcome
from sdp.datasets.parts import Layout
from sdp.datasets.repeated import REASON, Repeated
from sdp.encode import table
from sdp.encode.chunk import Chunk
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.encode.table import RowShape
from sdp.encode.transform import SandboxedCrops, Transform
from sdp.errors import AlreadyExists
from sdp.families.classes import import_compiler
from sdp.families.tokenizer import load_tokenizer, tokenize
from sdp.imaging import Pixels, decode
from sdp.model import load, sources
from sdp.model.layout import ModelSource
from sdp.runners.stages import PrepareStats, Preparing
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox, once_a_thread
from sdp.sources.pieces import Piece
from sdp.sources.reading import Columns, SourceRow, read_piece
from sdp.storage import Storage, StorageOptions

if TYPE_CHECKING:
    from sdp.encode.encoder import Encoder

PieceRows = tuple[pa.Table, list[Outcome]]
"""A piece's result: rows to store, and the outcomes of the other addresses."""
WorkItem = tuple[Piece, NDArray[np.int64] | None]
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

    def pixels(self, data: bytes | memoryview, min_side: int) -> Pixels:
        """Decode an image, to at least this shorter side."""
        if self.foreign:
            return child.unpacked(*_sandbox(min_side)(data))
        return decode(data, min_side=min_side).pixels


@dataclass(frozen=True, kw_only=True)
class RowsSpec(SourceSpec, Preparing, ABC):
    """The stages for pieces of a dataset, with all settings of their transforms and encoders."""

    kind: ClassVar[str]
    layout: ClassVar[Layout]
    recipe: Recipe
    settings: EncoderSettings

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of the rows that they make."""

    def run_transform(self, transform: Transform, item: WorkItem) -> tuple[Chunk, PrepareStats]:
        """Read a piece of the source and transform its rows, with the times that both take."""
        piece, only = item
        reading_s = 0.0

        def rows() -> Iterator[SourceRow]:
            nonlocal reading_s
            source = read_piece(piece, self.columns, options=self.storage, only=only, seed=self.recipe.seed)
            while True:
                began = time.perf_counter()
                row = next(source, None)
                reading_s += time.perf_counter() - began
                if row is None:
                    return
                yield row

        began = time.perf_counter()
        chunk = transform(rows())
        return chunk, PrepareStats(len(chunk), time.perf_counter() - began - reading_s, reading_s)


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(RowsSpec):
    """The stages that make latents."""

    kind: ClassVar[str] = "latents"
    layout: ClassVar[Layout] = table.LAYOUT
    model: ModelSource
    """Pinned by its digest, so that no worker encodes with another model."""
    shape: RowShape

    @property
    def schema(self) -> pa.Schema:
        return table.schema(self.shape)

    def prepare(self, item: WorkItem) -> tuple[Chunk, PrepareStats]:
        """Read a piece and return its crops and tokens."""
        tokenizer = _tokenizer(self.model, self.storage)
        crops = _sandboxed_crops(self.recipe) if self.foreign else None
        return self.run_transform(Transform(self.recipe, tokenizer, reason_to_skip(self), crops), item)

    def load(self) -> "Encoder":
        """Load the encoder; where captions are embedded, store the empty caption's embedding."""
        encoder = self.load_encoder()
        if self.shape.text.width is not None and not self.output.exists(table.EMPTY_TEXT):
            with suppress(AlreadyExists):
                self.output.create(table.EMPTY_TEXT, table.npy_bytes(self.embed_empty(encoder)))
        return encoder

    def load_encoder(self, device: str | None = None) -> "Encoder":
        """Load the encoder from the model with the pinned digest."""
        from sdp.encode.encoder import Encoder  # imports torch, which transforms do not need

        if self.settings.compile:
            import_compiler()
        model = sources.resolve(self.model, storage=self.storage)
        text = load.load_text_encoder(model.path) if self.shape.text.width is not None else None
        vae, family = load.load_vae(model.path), model.family
        return Encoder(vae, self.settings, family=family, text_encoder=text, device=device)

    def embed_empty(self, encoder: "Encoder") -> NDArray[np.float16]:
        """Return the embedding of the empty caption, which caption dropout puts in place of a caption."""
        model = sources.resolve(self.model, storage=self.storage)
        return encoder.embed(tokenize(load_tokenizer(model.path), [""]))

    def work(self, worker: "Encoder", value: Chunk) -> PieceRows:
        encoded = worker(value)
        return table.rows_of(encoded, self.shape), encoded.outcomes


def reason_to_skip(spec: SourceSpec) -> Callable[[int], str | None]:
    """Return the function that says why an address is left out, if it is."""
    taken_down = BitMap64.deserialize(spec.taken_down) if spec.taken_down else BitMap64()

    def reason(row: int) -> str | None:
        if row in taken_down:
            return "tombstone"
        return REASON if spec.repeated is not None and row in spec.repeated else None

    return reason


_sandboxed_crops = once_a_thread(SandboxedCrops)


@once_a_thread
def _sandbox(min_side: int) -> Sandbox:
    return Sandbox(partial(child.pixels, min_side=min_side))


@lru_cache(maxsize=1)
def _tokenizer(model: ModelSource, storage: StorageOptions) -> Any:
    """Load the tokenizer, once per process: loading takes longer than a piece."""
    return load_tokenizer(sources.resolve(model, storage=storage).path)
