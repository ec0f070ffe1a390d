"""A batch: what every way of reading data hands to the trainer."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from sdp.datasets.outcomes import Outcome

PAD = -1
"""The address of a row that only fills a batch up; its weight is 0."""


@dataclass(frozen=True)
class Batch:
    """Some rows, one entry each. The text is there as token ids or as the text encoder's output."""

    rows: Tensor
    """int64: addresses."""
    weights: Tensor
    """fp32: what a row counts for in the loss. 0: it is padding, taken down, held out, or turned out bad."""
    latents: Tensor
    """fp16: scaled as the VAE's latents are for the U-Net."""
    token_ids: Tensor | None = None
    """uint16 (n, 77)."""
    text: Tensor | None = None
    """fp16 (n, 77, width)."""
    moments: bool = False
    """The latents are mean and log-variance, of twice the channels, still to be drawn from."""
    bad: tuple[Outcome, ...] = ()
    """Why rows turned out bad."""
    epochs: Tensor | None = None
    """int64: of each row the pass over its own dataset, where several are mixed; else all are of the run's epoch."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of each micro-batch the latents' shape where these differ; `latents` has each row's numbers in a line then."""

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the copy does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, size: int) -> Iterator["Batch"]:
        """Yield micro-batches of at most `size` rows, as equal as can be: two lengths at most, each its own kernels."""
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
        """The same, by the epoch to which the account puts them down."""
        if self.epochs is None:
            yield epoch, self.counted
            return
        own = self.epochs[self.weights > 0]
        for each in sorted(set(own.tolist())):
            yield each, self.counted[own == each]

    def with_bad(self, bad: Iterable[Outcome]) -> "Batch":
        """The same, and why some of its rows are bad."""
        return replace(self, bad=tuple(bad))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            change(self.rows),
            change(self.weights),
            change(self.latents),
            change(self.token_ids) if self.token_ids is not None else None,
            change(self.text) if self.text is not None else None,
            self.moments,
            epochs=change(self.epochs) if self.epochs is not None else None,
            shapes=self.shapes,
        )
