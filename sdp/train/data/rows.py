"""Rows inside a reader, their columns as raw bytes, and the batch made from them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdp.train.data.columns import MOMENTS, TOKEN_IDS, Column

if TYPE_CHECKING:
    from torch import Tensor

    from sdp.train.data.batch import Batch


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


def batch_of(columns: tuple[Column, Column], size: int, filled: Sequence[Rows], *, pin: bool = False) -> "Batch":
    """Join rows into a batch, padded to `size`; the only place where a batch's bytes are copied."""
    import torch  # imported late: encoders need no torch to read

    from sdp.train.data.batch import PAD, Batch

    latents, text = columns
    kind = "token_ids" if text.name == TOKEN_IDS else "text"
    tensors: dict[str, Any] = {
        "rows": torch.empty(size, dtype=torch.int64),
        "weights": torch.empty(size),
        "latents": torch.empty((size, *latents.shape), dtype=latents.torch_dtype, pin_memory=pin),
        kind: torch.empty((size, *text.shape), dtype=text.torch_dtype, pin_memory=pin),
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


class Buffers:
    """Memory of consumed windows for reuse: allocating pages costs as much as copying into them."""

    def __init__(self, columns: tuple[Column, Column], keep: int = 64) -> None:
        self._columns = columns
        self._free: deque[Rows] = deque(maxlen=keep)

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


def _raw(tensor: "Tensor") -> NDArray[np.void]:
    """Return a tensor's memory as one item per row."""
    flat = tensor.flatten(1).numpy()
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]
