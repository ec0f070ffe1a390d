"""The pipeline's stages that score pictures: hashes and CLIP's views on CPUs, CLIP on accelerators."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.parts import Layout
from sdp.encode.chunk import Chunk
from sdp.encode.transform import Crops, Transform
from sdp.encode.work import PieceRows, RowsSpec, WorkItem, reason_to_skip
from sdp.families.tokenizer import load_clip_tokenizer
from sdp.model import load, networks
from sdp.model.clip import Predictor, View
from sdp.model.layout import ModelSource
from sdp.runners.stages import PrepareStats
from sdp.score.near import perceptual_hash
from sdp.storage import StorageOptions

if TYPE_CHECKING:
    from sdp.score.scorer import Scorer

HASH = 1
"""The key of hashes among a chunk's crops, which are by resolution."""
HASHED_SIDE = 64
"""Images are decoded to at least this shorter side."""
_OVERSAMPLE = 2
"""JPEGs are decoded to at least this many times the size of CLIP's view."""


@dataclass(frozen=True, kw_only=True)
class ScoreSpec(RowsSpec):
    """The stages that score pictures."""

    kind: ClassVar[str] = "scores"
    layout: ClassVar[Layout] = Layout(row_group_rows=65_536, compression="zstd")
    clip: ModelSource | None
    """Pinned by its digest, as is the predictor."""
    view: View | None
    aesthetics: Predictor | None

    @property
    def min_side(self) -> int:
        """The shorter side to which images are decoded at least."""
        return HASHED_SIDE if self.view is None else max(HASHED_SIDE, _OVERSAMPLE * self.view.shortest)

    @property
    def schema(self) -> pa.Schema:
        fields = [pa.field("row", pa.int64(), nullable=False), pa.field("key", pa.string())]
        if self.aesthetics is not None:
            fields.append(pa.field("aesthetics", pa.float32(), nullable=False))
        if self.clip is not None:
            fields.append(pa.field("similarity", pa.float32()))
        return pa.schema([*fields, pa.field("hash", pa.uint64(), nullable=False)])

    def prepare(self, item: WorkItem) -> tuple[Chunk, PrepareStats]:
        """Read a piece and return its hashes, views and tokens."""
        tokenizer = _tokenizer(self.clip, self.storage) if self.clip is not None else None
        step = Transform(self.recipe, tokenizer, reason_to_skip(self), self._look, captioned=False)
        return self.run_transform(step, item)

    def load(self) -> "Scorer | None":
        """Load CLIP, if there is one, and the predictor of aesthetics."""
        if self.clip is None or self.view is None:
            return None
        from transformers import CLIPModel  # imports torch, which transforms do not need

        from sdp.score.scorer import Scorer

        path = networks.find(self.clip, "score.clip_model", storage=self.storage).path
        layers = [] if self.aesthetics is None else self.aesthetics.load(self.storage)
        return Scorer(load.load_network(CLIPModel, path), self.view, self.settings, layers)

    def work(self, worker: "Scorer | None", value: Chunk) -> PieceRows:
        """Score a chunk."""
        columns: dict[str, Any] = {"row": value.rows, "key": value.keys}
        hashes = value.crops[HASH][0].values if len(value) else np.zeros((0, 8), np.uint8)
        columns["hash"] = np.ascontiguousarray(hashes).view(">u8").ravel().astype(np.uint64)
        good = np.ones(len(value), np.bool_)
        if worker is not None:
            scores = worker(value)
            good = scores.good
            columns["aesthetics"] = scores.aesthetics
            columns["similarity"] = pa.array(scores.similarity, pa.float32(), mask=~value.tokens.any(axis=1))
        table = pa.table({name: columns[name] for name in self.schema.names}, schema=self.schema)
        failed = [Outcome(row, FAILED, "not_finite", "NaN or infinite scores") for row in value.rows[~good].tolist()]
        return table.filter(pa.array(good)), [*value.outcomes, *failed]

    def _look(self, data: bytes | memoryview, _: int) -> Crops:
        """Return an image's hash and CLIP's view of it."""
        pixels = self.pixels(data, self.min_side)
        crops = {HASH: np.frombuffer(perceptual_hash(pixels).to_bytes(8), np.uint8)}
        if self.view is not None:
            crops[self.view.side] = self.view.cut(pixels)
        return 0, crops


@lru_cache(maxsize=1)
def _tokenizer(clip: ModelSource, storage: StorageOptions) -> Any:
    """Load the tokenizer, once per process: loading takes longer than a piece."""
    return load_clip_tokenizer(networks.find(clip, "score.clip_model", storage=storage).path)
