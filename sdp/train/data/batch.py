"""A batch, and the interface of the readers that return it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from sdp.datasets.outcomes import Outcome
from sdp.model.checkpoints import EpochStart


class Reader(Protocol):
    """The interface of readers. All readers yield the same kind of batches."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""

    def positions(self, start: EpochStart) -> int:  # noqa: ARG002 (for other readers)
        """Return the number of positions in an epoch."""
        return self.rows

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart) -> "Iterator[Batch]":
        """Yield this worker's share of each batch from a position on. Shares have the same length on all workers."""

    def after(self, epoch: int, start: EpochStart) -> EpochStart:  # noqa: ARG002 (for other readers)
        """Return the start of the next epoch."""
        return start


PAD = -1
"""The address of padding; its weight is 0."""


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
                latents = part.latents[:, : math.prod(shape)].reshape(-1, *shape)
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
