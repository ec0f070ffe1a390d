"""The accelerator's half of scoring: CLIP's embeddings of pictures and captions, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from sdp.device import DTYPES
from sdp.encode.chunk import Chunk
from sdp.encode.encoder import BatchEncoder
from sdp.encode.recipe import TEXT, EncoderSettings
from sdp.model.clip import View

Scores32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a chunk's pictures."""

    aesthetics: Scores32 | None
    similarity: Scores32
    """The cosine to the caption; meaningless where there is none."""
    good: NDArray[np.bool_]
    """True where all numbers are finite."""


class Scorer(BatchEncoder):
    """CLIP with a predictor of aesthetics, loaded on one device."""

    def __init__(
        self, clip: Any, view: View, settings: EncoderSettings, layers: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        super().__init__(settings)
        self._view = view
        self._pictures = self._prepared(_Half(clip.vision_model, clip.visual_projection))
        self._captions = self._prepared(_Half(clip.text_model, clip.text_projection))
        self._layers = [(weight.to(self.device), bias.to(self.device)) for weight, bias in layers]
        self._mean, self._deviation = (torch.tensor(each, device=self.device) for each in (view.mean, view.deviation))

    def __call__(self, chunk: Chunk) -> Scores:
        """Return the scores of a chunk."""
        if not len(chunk):
            return Scores(np.zeros(0, np.float32), np.zeros(0, np.float32), np.ones(0, np.bool_))
        captioned, texts = np.flatnonzero(chunk.tokens.any(axis=1)), None
        with self._launched():
            (group,) = chunk.crops[self._view.side]
            pictures = self._in_batches(self._view.side, group.values, group.positions, self._picture)
            if len(captioned):
                tokens = chunk.tokens[captioned].astype(np.int64)
                texts = self._in_batches(TEXT, tokens, captioned, self._caption)
        embeddings, good, aesthetics = pictures[0].numpy(), pictures[1].numpy().copy(), None
        if self._layers:
            embeddings, aesthetics = embeddings[:, :-1], embeddings[:, -1]
        similarity = np.zeros(len(chunk), np.float32)
        if texts is not None:
            similarity[captioned] = (embeddings[captioned] * texts[0].numpy()).sum(axis=1)
            good[captioned] &= texts[1].numpy()
        return Scores(aesthetics, similarity, good)

    def _picture(self, pixels: Tensor, _: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return normalised embeddings of uint8 pixels, each followed by its aesthetics if there are layers."""
        planes = (pixels.float() * self._view.scale - self._mean) / self._deviation
        planes = planes.permute(0, 3, 1, 2).to(DTYPES[self._settings.dtype])
        values = score = functional.normalize(self._pictures(planes).float(), dim=1)
        for weight, bias in self._layers:
            score = functional.linear(score, weight, bias)
        return _finite(torch.cat([values, score], dim=1) if self._layers else values)

    def _caption(self, ids: Tensor, _: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return _finite(functional.normalize(self._captions(ids).float(), dim=1))


class _Half(nn.Module):
    """CLIP's encoder of pictures, or of captions. Padding changes no embedding: captions' attention is causal."""

    def __init__(self, network: Any, projection: Any) -> None:
        super().__init__()
        self.network, self.projection = network, projection

    def forward(self, values: Tensor) -> Tensor:
        embeddings: Tensor = self.projection(self.network(values).pooler_output)
        return embeddings


def _finite(values: Tensor) -> tuple[Tensor, Tensor]:
    return values, values.isfinite().all(1)
