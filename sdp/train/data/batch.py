"""A batch, and how it is made from rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdp.datasets.outcomes import Outcome
from sdp.families import ALL_TOKENS, TextSpace
from sdp.train.data.columns import MOMENTS, TOKEN_IDS, Column, RowColumns
from sdp.train.data.rows import PAD, Rows, blank_rows, items_of

ShapePart = tuple[RowColumns, Sequence[Rows]]
"""The columns and the rows of a micro-batch of one shape."""


@dataclass(frozen=True)
class Batch:
    """Rows, one entry each. Their text is either token ids or the text encoder's output."""

    rows: Tensor
    """Addresses, int64."""
    weights: Tensor
    """Weights in the loss, fp32; 0 for padding and for rows that are taken down, held out or bad."""
    latents: Tensor
    """Scaled latents, fp16."""
    token_ids: Tensor | None = None
    """uint16 (n, 77)."""
    text: Tensor | None = None
    """fp16 (n, 77, width)."""
    moments: bool = False
    """True if latents are mean and log-variance (twice the channels), to draw from."""
    bad: tuple[Outcome, ...] = ()
    """The bad rows and their reasons."""
    epochs: Tensor | None = None
    """The epoch of each row's dataset, int64, if several are mixed; None means the run's epoch for all."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The latents' shape of each micro-batch, if these differ; each row of `latents` is flat and padded then."""

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; from pinned memory the copy does not block."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, size: int) -> Iterator["Batch"]:
        """Yield micro-batches of at most `size` rows, of at most two lengths, since each has its own kernels."""
        count = -(-len(self) // size)
        ends = [len(self) * number // max(1, count) for number in range(count + 1)]
        for number, (start, stop) in enumerate(pairwise(ends)):
            part: Batch = self._each(lambda tensor, start=start, stop=stop: tensor[start:stop])  # type: ignore[misc]
            if self.shapes:
                shape = self.shapes[number]
                # Contiguous, or what is compiled would depend on the widest of the batch.
                latents = part.latents[:, : math.prod(shape)].reshape(-1, *shape).contiguous()
                part = replace(part, latents=latents, shapes=())
            yield part

    @property
    def counted(self) -> Tensor:
        """The addresses that are trained on."""
        return self.rows[self.weights > 0]

    def counted_by_epoch(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the addresses that are trained on, by epoch."""
        if self.epochs is None:
            yield epoch, self.counted
            return
        epochs = self.epochs[self.weights > 0]
        for number in sorted(set(epochs.tolist())):
            yield number, self.counted[epochs == number]

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors: dict[str, Any] = {n: change(value) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors, bad=())


def batch_of(
    columns: RowColumns, size: int, filled: Sequence[Rows], *, space: TextSpace = ALL_TOKENS, pin: bool = False
) -> Batch:
    """Join rows into a batch, padded to `size`; the only place where a batch's bytes are copied."""
    latents, text = columns
    captions = [part.text.view(text.dtype).reshape(-1, *text.shape) for part in filled]
    counted = [part.weights > 0 for part in filled]
    tokens = max(map(space.cut, captions, counted), default=text.shape[0])
    kind = "token_ids" if text.name == TOKEN_IDS else "text"
    tensors: dict[str, Any] = {
        "rows": torch.empty(size, dtype=torch.int64),
        "weights": torch.empty(size),
        "latents": torch.empty((size, *latents.shape), dtype=_torch_dtype(latents), pin_memory=pin),
        kind: torch.empty((size, tokens, *text.shape[1:]), dtype=_torch_dtype(text), pin_memory=pin),
    }
    into = {name: tensor.numpy() for name, tensor in tensors.items()}
    into["latents"] = items_of(into["latents"])
    if any(part.epoch is not None for part in filled):
        tensors["epochs"] = torch.empty(size, dtype=torch.int64)
    at = 0
    for part, own in zip(filled, captions, strict=True):
        stop = at + len(part)
        for target, values in zip(into.values(), (*part.arrays[:3], own[:, :tokens]), strict=True):
            target[at:stop] = values
        if "epochs" in tensors:
            tensors["epochs"][at:stop] = part.epoch
        at = stop
    for tensor in tensors.values():
        tensor[at:] = 0
    tensors["rows"][at:] = PAD
    bad = tuple(part.bad[row] for part in filled if part.bad for row in part.rows.tolist() if row in part.bad)
    return Batch(**tensors, moments=latents.name.startswith(MOMENTS), bad=bad)


def batch_of_shapes(
    parts: Sequence[ShapePart], size: int, *, space: TextSpace = ALL_TOKENS, pin: bool = False
) -> Batch:
    """Join micro-batches of one shape each, all padded to `size`, into a batch that `Batch.split` takes apart again."""
    widest, text = max((columns for columns, _ in parts), key=lambda columns: columns[0].numbers)
    flat = replace(widest, shape=(widest.numbers,)), text
    filled: list[Rows] = []
    for _, rows in parts:
        filled += [*rows, blank_rows(size - sum(map(len, rows)), flat)]
    shapes = tuple(latents.shape for (latents, _), _ in parts)
    return replace(batch_of(flat, size * len(parts), filled, space=space, pin=pin), shapes=shapes)


def _torch_dtype(column: Column) -> torch.dtype:
    return torch.from_numpy(np.empty(0, column.dtype)).dtype
