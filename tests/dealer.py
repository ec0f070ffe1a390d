"""A feed for tests that deals rows out at random, as Ray Data does."""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from sdp.train.data.latents import LatentsDataset
from sdp.train.data.order import EpochOrder, OrderShape
from sdp.train.data.rows import Rows
from sdp.train.data.segments import EpochLeft, left_of, windows
from sdp.train.data.weights import RowWeights

SHAPE = OrderShape(lanes=3, units=2, row_groups=2)


@dataclass
class Dealer:
    """Deals each segment's blocks out as Ray Data does: whole ones to whoever has least, the last ones cut."""

    latents: LatentsDataset
    rows: int
    world: int
    seed: int
    consumed: BitMap64 = field(default_factory=BitMap64)
    weigh: Any = field(default_factory=RowWeights)
    dealt: dict[int, list[list[Rows]]] = field(default_factory=dict)
    left: EpochLeft | None = None
    lock: Any = field(default_factory=threading.Lock)

    def feed(self, rank: int) -> "Hand":
        return Hand(self, rank)

    def deal(self, nth: int) -> list[list[Rows]]:
        assert self.left is not None
        tasks = list(windows(self.latents, self.left.segment(nth), self.left.order, SHAPE, self.world))
        blocks = [task.load(self.weigh) for task in tasks]
        random.Random(f"{self.seed} {nth}").shuffle(blocks)
        share = sum(map(len, blocks)) // self.world
        assert share * self.world == sum(map(len, blocks))
        hands: list[list[Rows]] = [[] for _ in range(self.world)]
        for block in blocks:
            while len(block):
                hand = min(hands, key=lambda some: sum(map(len, some)))
                some = min(len(block), share - sum(map(len, hand)))
                hand.append(block.slice(0, some))
                block = block.slice(some, len(block))
        return hands


@dataclass
class Hand:
    dealer: Dealer
    rank: int

    def segments(self, epoch: int, position: int) -> list[int]:  # noqa: ARG002
        dealer = self.dealer
        if dealer.left is None:
            order = EpochOrder(5, epoch, dealer.latents.blocks, SHAPE)
            dealer.left = left_of(order, dealer.rows, dealer.latents, dealer.consumed, dealer.weigh)
        return [-(-count // dealer.world) * dealer.world for count in dealer.left.counts]

    def blocks(self, epoch: int, nth: int) -> Iterator[Rows]:  # noqa: ARG002
        with self.dealer.lock:
            if nth not in self.dealer.dealt:
                self.dealer.dealt[nth] = self.dealer.deal(nth)
        yield from self.dealer.dealt[nth][self.rank]
