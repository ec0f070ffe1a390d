"""Rows after the transform, and after the encoder."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class ShapeGroup:
    """Crops of one shape."""

    positions: NDArray[np.int64]
    """Their positions among the chunk's items."""
    values: NDArray[Any]
    """Pixels: items × rows × columns × RGB, uint8. Latents: items × channels × rows × columns, fp16."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some addresses of a unit after the transform; an item is the crops of one image."""

    rows: NDArray[np.int64]
    keys: list[str]
    tokens: NDArray[np.uint32]
    crops: dict[int, list[ShapeGroup]]
    """By resolution: one group, or one for each shape if crops keep their aspect ratio."""
    buckets: NDArray[np.int16]
    captions: list[str] = field(default_factory=list)
    """The items' own captions, where there is no tokenizer."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes of the addresses that became no item."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk's items after encoding."""

    chunk: Chunk
    latents: dict[int, list[ShapeGroup]]
    """By resolution."""
    text: NDArray[np.float16] | None
    good: NDArray[np.bool_]
    """True for each item that is kept: all of its numbers are finite."""
    outcomes: list[Outcome]
    """Outcomes of the addresses that are not kept."""
