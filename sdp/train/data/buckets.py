"""Latents of several shapes, as `transform.crop: buckets` makes them: batches that are each of one shape.

A granule is what one worker takes at once (`data.batch_size` rows), of one bucket and one lane. Each bucket's rows lie
in an order of their own, cut into as many lanes as the others'; a lane's granules, of all buckets, come in a drawn
sequence, and the epoch takes one from each lane in turn. What is left of a bucket in a lane is a granule, too, filled
up with rows of weight 0. So a position is the account here as well: each granule has `data.batch_size` of them.
"""

import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.datasets.concurrently import ordered_map
from sdp.device import thread_pool
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.model.checkpoints import EpochStart
from sdp.storage import Storage
from sdp.train.data.batch import Batch
from sdp.train.data.direct import DirectReader, Passes
from sdp.train.data.latents import BUCKET, Column, GroupReader, LatentsDataset
from sdp.train.data.order import GRANULES, EpochOrder, Ints, Take, shuffled
from sdp.train.data.rows import batch_of


def views(dataset: LatentsDataset, counts: Ints) -> list[LatentsDataset]:
    """Return a dataset's rows bucket by bucket, given how many each row group has of each."""
    return [
        replace(
            dataset,
            blocks=replace(dataset.blocks, rows=counts[:, bucket]),
            latents=Column(dataset.latents.name, shape, dataset.latents.dtype),
            bucket=bucket,
        )
        for bucket, shape in enumerate(dataset.shapes)
        if counts[:, bucket].any()
    ]


def count_buckets(dataset: LatentsDataset, run: Storage, number: int, *, write: bool) -> Ints:
    """Return how many rows each row group has of each bucket; with `write` the run keeps that."""
    listed = zlib.crc32(dataset.blocks.rows.tobytes(), zlib.crc32("\n".join(dataset.paths).encode()))
    name = f"_source/{number:03d}-buckets-{listed:08x}.npy"
    try:
        kept: Ints = np.load(io.BytesIO(run.read(name)), allow_pickle=False)
        return kept
    except NotFound:
        reader, kinds = GroupReader(dataset), len(dataset.shapes)
    counts = np.zeros((len(dataset.blocks), kinds), np.int64)
    for block, buckets in enumerate(ordered_map(reader.buckets, range(len(dataset.blocks)))):
        if len(buckets) and not 0 <= int(buckets.min()) <= int(buckets.max()) < kinds:
            path = dataset.paths[int(dataset.blocks.part[block])]
            raise DatasetError(
                f"{dataset.files.uri_of(path)}: row group {int(dataset.blocks.group[block])}: {BUCKET}: expected 0 to "
                f"{kinds - 1}, got {buckets.min()} to {buckets.max()}; process it again"
            )
        counts[block] = np.bincount(buckets, minlength=kinds)
    if write:
        sink = io.BytesIO()
        np.save(sink, counts, allow_pickle=False)
        with suppress(AlreadyExists):  # another worker was first, with the same
            run.create(name, sink.getvalue())
    return counts


@dataclass(frozen=True)
class BucketReader(DirectReader):
    """Batches of one worker, each micro-batch of one shape. Its ingredients are a dataset's buckets."""

    granule: int = field(kw_only=True)
    """Rows that one worker takes at once."""

    def __post_init__(self) -> None:
        """Accept ingredients of different shapes."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(some.dataset.rows for some in self.ingredients)

    @property
    def mixed(self) -> bool:
        return False

    def positions(self, start: EpochStart) -> int:
        """Return how many positions an epoch has: what fills up each bucket's last granules counts as well."""
        lanes = start.lanes or self.shape.lanes
        if lanes not in self._positions:
            shape = replace(self.shape, lanes=lanes)
            orders = [EpochOrder(self.seed, 0, some.dataset.blocks, shape) for some in self.ingredients]
            self._positions[lanes] = len(_Sequence(orders, self.granule)) * self.granule
        return self._positions[lanes]

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Positions of an epoch, by its number of lanes: every step asks for them."""
        return {}

    def _batches(self, epoch: int, position: int, batch_size: int, begin: EpochStart) -> Iterator[Batch]:
        step = batch_size // self.granule
        share = -(-step // self.world)
        with thread_pool(self.device, self.threads, "sdp-read") as pool:
            passes = Passes(self, pool, begin)
            sequence = _Sequence([passes.order(n, epoch) for n in range(len(self.ingredients))], self.granule)
            try:
                for start in range(position // self.granule, len(sequence), step):
                    # A granule's worker follows from its number, so that each keeps to its own lanes.
                    first = start + (self.rank - start) % self.world
                    numbers = range(first, min(start + step, len(sequence)), self.world)
                    mine = [granule for number in numbers if (granule := sequence[number]) is not None]
                    for bucket, take in mine:
                        passes.lanes(bucket, epoch).want([take])
                    yield self._batch(passes, epoch, mine, share)
                    for bucket, take in mine:
                        passes.lanes(bucket, epoch).forget_in(take.lane, take.stop)
            finally:
                passes.close()

    def _batch(self, passes: Passes, epoch: int, mine: list[tuple[int, Take]], share: int) -> Batch:
        """Put so many granules together, with empty ones in the place of those that there are not."""
        parts = []
        for bucket, take in mine:
            rows = list(passes.lanes(bucket, epoch).take(take))
            parts.append(batch_of(self.ingredients[bucket].dataset.columns, self.granule, rows))
        parts += [batch_of(self.ingredients[0].dataset.columns, self.granule, [])] * (share - len(parts))
        return join(parts, pin=self.device.type == "cuda")


def join(parts: list[Batch], *, pin: bool = False) -> Batch:
    """Return batches of several shapes as one, whose micro-batches they are."""
    shapes = tuple(tuple(part.latents.shape[1:]) for part in parts)
    width = max(int(np.prod(shape)) for shape in shapes)
    latents = torch.zeros((sum(map(len, parts)), width), dtype=parts[0].latents.dtype, pin_memory=pin)
    at = 0
    for part in parts:
        flat = part.latents.flatten(1)
        latents[at : at + len(part), : flat.shape[1]] = flat
        at += len(part)

    def together(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else _pinned(torch.cat(tensors), pin=pin)

    rows, weights = (torch.cat([getattr(part, name) for part in parts]) for name in ("rows", "weights"))
    return Batch(
        rows, weights, latents, together("token_ids"), together("text"), moments=parts[0].moments, shapes=shapes
    )


def _pinned(tensor: Tensor, *, pin: bool) -> Tensor:
    return tensor.pin_memory() if pin else tensor


class _Sequence:
    """The granules of an epoch in their order: of each its bucket and rows, or None where a lane has no more."""

    def __init__(self, orders: list[EpochOrder], granule: int) -> None:
        self._orders, self._granule = orders, granule
        self._lanes = orders[0].lanes
        self._drawn: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        # The first lane has as many rows of each bucket as any.
        return self._lanes * int(self._counts(0).sum())

    def __getitem__(self, number: int) -> tuple[int, Take] | None:
        at, lane = divmod(number, self._lanes)
        if lane not in self._drawn:
            self._drawn[lane] = self._draw(lane)
        buckets, numbers = self._drawn[lane]
        if at >= len(buckets):
            return None
        bucket, start = int(buckets[at]), int(numbers[at]) * self._granule
        rows = self._orders[bucket].lane_rows(lane)
        return bucket, Take(lane, start, min(start + self._granule, rows))

    def _counts(self, lane: int) -> Ints:
        """How many granules a lane has of each bucket."""
        return np.array([-(-order.lane_rows(lane) // self._granule) for order in self._orders], np.int64)

    def _draw(self, lane: int) -> tuple[Ints, Ints]:
        """A lane's buckets in their order, and the how many-th granule of its bucket each one is."""
        counts = self._counts(lane)
        buckets = np.repeat(np.arange(len(counts)), counts)
        of = self._orders[0]
        buckets = buckets[shuffled(len(buckets), of.seed, of.epoch, GRANULES, lane)]
        numbers = np.empty_like(buckets)
        for bucket, count in enumerate(counts.tolist()):
            numbers[buckets == bucket] = np.arange(count)
        return buckets, numbers
