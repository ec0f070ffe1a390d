"""Latents of several shapes, as `transform.crop: buckets` makes them, read in batches of one shape each.

A granule is one worker's micro-batch: `data.batch_size` rows of one bucket and one lane. Each bucket has an order of
its own, and all are cut into the same number of lanes. A lane's granules, from all buckets, are shuffled, and the epoch
takes one from each lane in turn. The remainder of a bucket in a lane is a granule too, padded with rows of weight 0.
A granule takes `data.batch_size` positions of the epoch.
"""

import io
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sdp.console import Progress
from sdp.datasets.concurrently import ordered_map
from sdp.errors import DatasetError, NotFound
from sdp.storage import Storage
from sdp.train.data.columns import BUCKET, Column
from sdp.train.data.latents import GroupReader, LatentsDataset
from sdp.train.data.mixture import WeightedDataset
from sdp.train.data.order import GRANULES, EpochOrder, Ints, LaneRange, Shuffle, shuffled


def views(dataset: LatentsDataset, counts: Ints) -> list[LatentsDataset]:
    """Return a view of the dataset for each bucket, given the rows of each row group (line) and bucket (column)."""
    return [
        replace(
            dataset,
            row_groups=replace(dataset.row_groups, rows=counts[:, bucket]),
            latents=Column(dataset.latents.name, shape, dataset.latents.dtype),
            bucket=bucket,
        )
        for bucket, shape in enumerate(dataset.shapes)
        if counts[:, bucket].any()
    ]


def count_buckets(dataset: LatentsDataset, run: Storage, *, write: bool) -> Ints:
    """Return the number of rows by row group and bucket; with `write`, store the counts in the run's folder."""
    checksum = zlib.crc32(dataset.row_groups.rows.tobytes(), zlib.crc32("\n".join(dataset.paths).encode()))
    name = f"_source/000-buckets-{checksum:08x}.npy"
    try:
        stored: Ints = np.load(io.BytesIO(run.read(name)), allow_pickle=False)
        return stored
    except NotFound:
        reader, kinds = GroupReader(dataset), len(dataset.shapes)
    counts = np.zeros((len(dataset.row_groups), kinds), np.int64)
    with Progress("train: counting the shapes of crops") as progress:
        for row_group, buckets in enumerate(ordered_map(reader.buckets, range(len(dataset.row_groups)))):
            if len(buckets) and not 0 <= int(buckets.min()) <= int(buckets.max()) < kinds:
                path, group = dataset.locate(row_group)
                raise DatasetError(
                    f"{dataset.files.uri_of(path)}: row group {group}: {BUCKET}: expected 0 to {kinds - 1}, got "
                    f"{buckets.min()} to {buckets.max()}; process the images again"
                )
            counts[row_group] = np.bincount(buckets, minlength=kinds)
            progress.update(f"{row_group + 1:,} of {len(counts):,} row groups")
    if write:
        sink = io.BytesIO()
        np.save(sink, counts, allow_pickle=False)
        run.publish(name, sink.getvalue())
    return counts


class Granules:
    """The granules of an epoch in order, each with its bucket and rows; None where a lane has no more."""

    def __init__(self, orders: list[EpochOrder], granule: int) -> None:
        self._orders, self._granule = orders, granule
        self._lanes = orders[0].lanes
        self._drawn: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        # The first lane has at least as many rows of each bucket as any other.
        return self._lanes * int(self._counts(0).sum())

    def __getitem__(self, number: int) -> tuple[int, LaneRange] | None:
        at, lane = divmod(number, self._lanes)
        if lane not in self._drawn:
            self._drawn[lane] = self._draw(lane)
        buckets, numbers = self._drawn[lane]
        if at >= len(buckets):
            return None
        bucket, start = int(buckets[at]), int(numbers[at]) * self._granule
        rows = self._orders[bucket].lane_rows(lane)
        return bucket, LaneRange(lane, start, min(start + self._granule, rows))

    def _counts(self, lane: int) -> Ints:
        """Return the number of granules of a lane, by bucket."""
        return np.array([-(-order.lane_rows(lane) // self._granule) for order in self._orders], np.int64)

    def _draw(self, lane: int) -> tuple[Ints, Ints]:
        """Return a lane's granules in order: the bucket of each, and its number within that bucket."""
        counts = self._counts(lane)
        buckets = np.repeat(np.arange(len(counts)), counts)
        order = self._orders[0]
        buckets = buckets[shuffled(len(buckets), order.seed, order.epoch, GRANULES, lane)]
        numbers = np.empty_like(buckets)
        for bucket, count in enumerate(counts.tolist()):
            numbers[buckets == bucket] = np.arange(count)
        return buckets, numbers


def count_positions(buckets: Sequence[WeightedDataset], seed: int, shape: Shuffle, granule: int) -> int:
    """Return the number of positions in an epoch, with the padding of each bucket's last granules."""
    orders = [EpochOrder(seed, 0, source.dataset.row_groups, shape) for source in buckets]
    return len(Granules(orders, granule)) * granule
