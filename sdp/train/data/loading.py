"""From row groups to rows: addresses, weights, latents, and for each row one of its captions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdp.train.data.latents import GroupReader, Items
from sdp.train.data.order import Ints, Piece
from sdp.train.data.rows import Rows
from sdp.train.data.weights import Weigh

_MARK = 8
"""Bytes by which a caption is told from the zeros that stand where there is none: no text begins with so many."""
_BITS = 31

Kept = NDArray[np.bool_] | None
"""Which rows of a piece are wanted; None: all of them."""


@dataclass(frozen=True)
class Loader:
    """Loads rows of one dataset for one epoch; safe to use from several threads."""

    reader: GroupReader
    weigh: Weigh
    seed: int
    epoch: int
    """The dataset's own."""
    offset: int = 0
    """Added to its addresses."""

    def load(self, pieces: Sequence[Piece], places: Ints, into: Rows, kept: Sequence[Kept] = ()) -> None:
        """Put the pieces' rows, which lie one after the other, to their places."""
        at = 0
        for number, piece in enumerate(pieces):
            addresses, (latents, *texts) = self.reader.read(piece)
            if kept and (wanted := kept[number]) is not None:
                addresses = addresses[wanted]
                latents, *texts = ([np.concatenate(chunks)[wanted]] for chunks in (latents, *texts))
            here = places[at : at + len(addresses)]
            at += len(addresses)
            into.rows[here] = addresses + self.offset
            into.weights[here] = self.weigh(addresses)
            _scatter(latents, here, into.latents)
            _scatter(self._chosen(texts, addresses), here, into.text)

    def _chosen(self, texts: Sequence[list[Items]], addresses: Ints) -> list[Items]:
        """One caption of each row."""
        if len(texts) == 1 and all(chunk.shape[1] == 1 for chunk in texts[0]):
            return texts[0]
        captions = np.concatenate([np.concatenate(chunks) for chunks in texts], axis=1)
        chosen = choose_captions(captions, self.seed, self.epoch, addresses + self.offset)
        return [captions[np.arange(len(captions)), chosen][:, None]]


def choose_captions(captions: Items, seed: int, epoch: int, rows: Ints) -> Ints:
    """For each row one of the captions that it has, drawn from (seed, epoch, row)."""
    import torch

    from sdp.train.randomness import Purpose, RowRandom

    count, width = captions.shape[1], captions.dtype.itemsize
    raw = np.ascontiguousarray(captions).view(np.uint8).reshape(len(captions), count, width)
    there = raw[:, :, :_MARK].any(axis=2)
    drawn = RowRandom(seed, epoch, torch.from_numpy(rows)).integers(Purpose.CAPTION, 1 << _BITS).numpy()
    nth = (drawn * np.maximum(1, there.sum(axis=1))) >> _BITS
    first_those = np.argsort(~there, axis=1, kind="stable")
    chosen: Ints = first_those[np.arange(len(captions)), nth]
    return chosen


def _scatter(chunks: Sequence[Items], places: Ints, into: NDArray[np.void]) -> None:
    """Put each row of some chunks where it belongs."""
    at = 0
    for items in chunks:
        into[places[at : at + len(items)]] = items[:, 0]
        at += len(items)
