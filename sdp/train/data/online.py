"""The trainer's side of online mode: slices are submitted to be encoded elsewhere, a bounded number ahead of need.

This bounds memory: a slice is submitted only when an earlier one has been used, so encoders are never more than `ahead`
slices ahead of a trainer, however many or fast they are.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sdp.config.train import TrainConfig
from sdp.train.data.images import EncodedSlice, ImagesDataset, Slice
from sdp.train.data.order import Shuffle

Submit = Callable[[Slice | None], Callable[[], Any]]
"""Submits a slice, or None for the empty caption; returns a function that waits for the EncodedSlice or embedding."""

_PER_ENCODER = 4
"""Slices in flight for each encoder: two at the encoder, one in transform, one finished and not yet fetched."""


@dataclass(frozen=True)
class Online:
    """An engine whose encoders run elsewhere."""

    submit: Submit
    ahead: int

    def encoded(self, slices: Iterator[Slice]) -> Iterator[EncodedSlice]:
        """See Engine."""
        waiting: deque[Callable[[], Any]] = deque()
        for data_slice in slices:
            waiting.append(self.submit(data_slice))
            if len(waiting) > self.ahead:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()


def slices_ahead(config: TrainConfig, images: ImagesDataset, world: int) -> int:
    """Return the slices that one of `world` trainers has in flight: a window, and its share of the encoders' queue."""
    groups = images.row_groups.rows[: Shuffle().row_groups]
    window = int(sum(-(-rows // images.slice_rows) for rows in groups.tolist()))
    return window + -(-_PER_ENCODER * config.encode.most // world)
