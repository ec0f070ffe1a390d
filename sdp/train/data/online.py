"""A trainer's side of online mode: slices are sent to be encoded somewhere else, a bounded number ahead of need.

What bounds the memory is here: a slice is asked for when one before it has been used, so nothing runs ahead of the
trainers by more than `ahead` slices each, however many encoders there are or how fast they work.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sdp.config import TrainConfig
from sdp.train.data.images import EncodedSlice, ImagesDataset, Slice

Ask = Callable[[Slice | None], Callable[[], Any]]
"""Has a slice encoded, or the empty caption; what it returns waits for the EncodedSlice, or the embedding."""

_PER_ENCODER = 4
"""Slices under way for each encoder: two in its hands, one in transform, one finished and not fetched."""


@dataclass(frozen=True)
class Online:
    """Encodes elsewhere."""

    ask: Ask
    ahead: int

    def encoded(self, slices: Iterator[Slice]) -> Iterator[EncodedSlice]:
        """See Engine."""
        waiting: deque[Callable[[], Any]] = deque()
        for some in slices:
            waiting.append(self.ask(some))
            if len(waiting) > self.ahead:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()


def slices_ahead(config: TrainConfig, images: ImagesDataset, world: int) -> int:
    """How many slices one of `world` trainers has under way: a window's, and its share of what keeps encoders busy."""
    groups = images.blocks.rows[: config.data.shuffle.row_groups]
    window = int(sum(-(-rows // images.slice_rows) for rows in groups.tolist()))
    return window + -(-_PER_ENCODER * config.encode.most // world)
