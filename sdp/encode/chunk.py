"""Rows on their way: as they come from the source, after the transform, and after encoding."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row as the transform takes it."""

    row: int
    key: str
    image: bytes | memoryview | None
    caption: str | None


@dataclass(frozen=True, slots=True)
class Group:
    """Crops of one shape."""

    where: NDArray[np.int64]
    """Which of the chunk's items they are."""
    values: NDArray[Any]
    """Items × rows × columns × RGB as uint8; of latents items × channels × rows × columns as fp16."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some addresses of a unit after the transform. An item is the crop of one image."""

    rows: NDArray[np.int64]
    keys: list[str]
    tokens: NDArray[np.uint16]
    crops: dict[int, list[Group]]
    """By resolution; one group, or as many as there are shapes where crops keep their aspect."""
    buckets: NDArray[np.int16]
    outcomes: list[Outcome] = field(default_factory=list)
    """Of the addresses that became no item."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class TransformStats:
    """How many items a transform made, and how long it took."""

    items: int = 0
    seconds: float = 0.0
    reading_s: float = 0.0
    """Waiting for the source, which `seconds` leaves out."""

    def __add__(self, other: "TransformStats") -> "TransformStats":
        return TransformStats(self.items + other.items, self.seconds + other.seconds, self.reading_s + other.reading_s)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What came out for a chunk's items."""

    chunk: Chunk
    latents: dict[int, list[Group]]
    """By resolution."""
    text: NDArray[np.float16] | None
    good: NDArray[np.bool_]
    """Which items to keep: all that came out for their row are finite numbers."""
    outcomes: list[Outcome]
    """Of the addresses that are not kept."""
