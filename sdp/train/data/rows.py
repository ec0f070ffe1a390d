"""Rows inside a reader: loading them from row groups, their columns as raw bytes, and the batch made from them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.train.data.batch import PAD, Batch
from sdp.train.data.columns import MOMENTS, TOKEN_IDS, Column, Items
from sdp.train.data.latents import GroupReader
from sdp.train.data.order import Ints, RowRange
from sdp.train.data.weights import Weigh

_KEPT = 64
"""Consumed windows whose memory is kept."""

ShapePart = tuple[tuple[Column, Column], Sequence["Rows"]]
"""The columns and the rows of a micro-batch of one shape."""
Kept = NDArray[np.bool_] | None
"""The rows of a range to keep; None means all."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order of the epoch."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]
    latents: NDArray[np.void]
    text: NDArray[np.void]
    epoch: int | None = None
    """The epoch of their dataset, if it is not the run's."""

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> "Rows":
        parts = (self.rows[start:stop], self.weights[start:stop], self.latents[start:stop], self.text[start:stop])
        return Rows(*parts, self.epoch)


def empty_rows(count: int, columns: tuple[Column, Column]) -> Rows:
    """Allocate memory for `count` rows."""
    latents, text = (np.empty(count, np.dtype((np.void, column.width))) for column in columns)
    return Rows(np.empty(count, np.int64), np.empty(count, np.float32), latents, text)


def batch_of(columns: tuple[Column, Column], size: int, filled: Sequence[Rows], *, pin: bool = False) -> Batch:
    """Join rows into a batch, padded to `size`; the only place where a batch's bytes are copied."""
    latents, text = columns
    kind = "token_ids" if text.name == TOKEN_IDS else "text"
    tensors: dict[str, Any] = {
        "rows": torch.empty(size, dtype=torch.int64),
        "weights": torch.empty(size),
        "latents": torch.empty((size, *latents.shape), dtype=_torch_dtype(latents), pin_memory=pin),
        kind: torch.empty((size, *text.shape), dtype=_torch_dtype(text), pin_memory=pin),
    }
    into = (tensors["rows"].numpy(), tensors["weights"].numpy(), _raw(tensors["latents"]), _raw(tensors[kind]))
    if any(part.epoch is not None for part in filled):
        tensors["epochs"] = torch.empty(size, dtype=torch.int64)
    at = 0
    for part in filled:
        stop = at + len(part)
        for target, values in zip(into, (part.rows, part.weights, part.latents, part.text), strict=True):
            target[at:stop] = values
        if "epochs" in tensors:
            tensors["epochs"][at:stop] = part.epoch
        at = stop
    for tensor in tensors.values():
        tensor[at:] = 0
    tensors["rows"][at:] = PAD
    return Batch(**tensors, moments=latents.name.startswith(MOMENTS))


def batch_of_shapes(parts: Sequence[ShapePart], size: int, *, pin: bool = False) -> Batch:
    """Join micro-batches of one shape each, all padded to `size`, into a batch that `Batch.split` takes apart again."""
    widest, text = max((columns for columns, _ in parts), key=lambda columns: columns[0].numbers)
    flat = replace(widest, shape=(widest.numbers,))
    filled = [rows for _, part in parts for rows in (*part, _padding(size - sum(map(len, part)), (flat, text)))]
    shapes = tuple(latents.shape for (latents, _), _ in parts)
    return replace(batch_of((flat, text), size * len(parts), filled, pin=pin), shapes=shapes)


def _padding(count: int, columns: tuple[Column, Column]) -> Rows:
    latents, text = (np.zeros(count, np.dtype((np.void, column.width))) for column in columns)
    return Rows(np.full(count, PAD, np.int64), np.zeros(count, np.float32), latents, text)


class Buffers:
    """Memory of consumed windows for reuse: allocating pages costs as much as copying into them."""

    def __init__(self, columns: tuple[Column, Column]) -> None:
        self._columns = columns
        self._free: deque[Rows] = deque(maxlen=_KEPT)

    def take(self, count: int) -> Rows:
        for _ in range(len(self._free)):
            try:
                rows = self._free.popleft()
            except IndexError:
                break  # another thread was faster
            if len(rows) >= count:
                return rows.slice(0, count)
        return empty_rows(count, self._columns)

    def give_back(self, rows: Rows) -> None:
        self._free.append(replace(rows, epoch=None))


@dataclass(frozen=True)
class Loader:
    """Loads rows of one dataset; safe to use from several threads."""

    reader: GroupReader
    weigh: Weigh
    offset: int = 0
    """Added to the addresses."""

    def load(self, ranges: Sequence[RowRange], places: Ints, into: Rows, masks: Sequence[Kept] = ()) -> None:
        """Load the rows of some ranges; the n-th row of all goes to places[n] of `into`."""
        at = 0
        for number, row_range in enumerate(ranges):
            addresses, (latents, text) = self.reader.read(row_range)
            if masks and (wanted := masks[number]) is not None:
                addresses = addresses[wanted]
                latents, text = ([np.concatenate(chunks)[wanted]] for chunks in (latents, text))
            range_places = places[at : at + len(addresses)]
            at += len(addresses)
            into.rows[range_places] = addresses + self.offset
            into.weights[range_places] = self.weigh(addresses)
            _scatter(latents, range_places, into.latents)
            _scatter(text, range_places, into.text)


def _scatter(chunks: Sequence[Items], places: Ints, into: NDArray[np.void]) -> None:
    """Copy the rows of some chunks to their places."""
    at = 0
    for items in chunks:
        into[places[at : at + len(items)]] = items
        at += len(items)


def _torch_dtype(column: Column) -> torch.dtype:
    return torch.from_numpy(np.empty(0, column.dtype)).dtype


def _raw(tensor: Tensor) -> NDArray[np.void]:
    """Return a tensor's memory as one item per row."""
    flat = tensor.flatten(1).numpy()
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]
