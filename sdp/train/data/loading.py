"""Loading rows from row groups: addresses, weights, latents, and one caption for each row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdp.train.data.columns import Items
from sdp.train.data.latents import GroupReader
from sdp.train.data.order import Ints, RowRange
from sdp.train.data.rows import Rows
from sdp.train.data.weights import Weigh

_MARK = 8
"""Leading bytes that are all zero only if a caption is missing: no text begins with so many zeros."""
_BITS = 31

Kept = NDArray[np.bool_] | None
"""The rows of a range to keep; None means all."""


@dataclass(frozen=True)
class Loader:
    """Loads rows of one dataset for one epoch; safe to use from several threads."""

    reader: GroupReader
    weigh: Weigh
    seed: int
    epoch: int
    """The epoch of this dataset."""
    offset: int = 0
    """Added to the addresses."""

    def load(self, ranges: Sequence[RowRange], places: Ints, into: Rows, masks: Sequence[Kept] = ()) -> None:
        """Load the rows of some ranges; the n-th row of all goes to places[n] of `into`."""
        at = 0
        for number, row_range in enumerate(ranges):
            addresses, (latents, *texts) = self.reader.read(row_range)
            if masks and (wanted := masks[number]) is not None:
                addresses = addresses[wanted]
                latents, *texts = ([np.concatenate(chunks)[wanted]] for chunks in (latents, *texts))
            range_places = places[at : at + len(addresses)]
            at += len(addresses)
            into.rows[range_places] = addresses + self.offset
            into.weights[range_places] = self.weigh(addresses)
            _scatter(latents, range_places, into.latents)
            _scatter(self._choose_captions(texts, addresses), range_places, into.text)

    def _choose_captions(self, texts: Sequence[list[Items]], addresses: Ints) -> list[Items]:
        """Return one caption for each row."""
        if len(texts) == 1 and all(chunk.shape[1] == 1 for chunk in texts[0]):
            return texts[0]
        captions = np.concatenate([np.concatenate(chunks) for chunks in texts], axis=1)
        chosen = choose_captions(captions, self.seed, self.epoch, addresses + self.offset)
        return [captions[np.arange(len(captions)), chosen][:, None]]


def choose_captions(captions: Items, seed: int, epoch: int, rows: Ints) -> Ints:
    """Choose for each row one of its captions, drawn from (seed, epoch, row); return their numbers."""
    import torch

    from sdp.train.randomness import Purpose, RowRandom

    count, width = captions.shape[1], captions.dtype.itemsize
    raw = np.ascontiguousarray(captions).view(np.uint8).reshape(len(captions), count, width)
    present = raw[:, :, :_MARK].any(axis=2)
    drawn = RowRandom(seed, epoch, torch.from_numpy(rows)).integers(Purpose.CAPTION, 1 << _BITS).numpy()
    nth = (drawn * np.maximum(1, present.sum(axis=1))) >> _BITS
    present_first = np.argsort(~present, axis=1, kind="stable")
    chosen: Ints = present_first[np.arange(len(captions)), nth]
    return chosen


def _scatter(chunks: Sequence[Items], places: Ints, into: NDArray[np.void]) -> None:
    """Copy the rows of some chunks to their places."""
    at = 0
    for items in chunks:
        into[places[at : at + len(items)]] = items[:, 0]
        at += len(items)
