"""Latents of several shapes, as `transform.crop: buckets` makes them, read in batches of one shape each.

A granule is one worker's micro-batch: `data.batch_size` rows of one bucket and one lane. Each bucket has an order of
its own, and all are cut into the same number of lanes. A lane's granules, from all buckets, are shuffled, and the epoch
takes one from each lane in turn. The remainder of a bucket in a lane is a granule too, padded with rows of weight 0.
A granule takes `data.batch_size` positions of the epoch.
"""

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from sdp.console import Progress
from sdp.datasets.concurrently import ordered_map
from sdp.errors import DatasetError, NotFound
from sdp.model.checkpoints import EpochStart
from sdp.storage import Storage
from sdp.train.data.columns import BUCKET
from sdp.train.data.latents import GroupReader, LatentsDataset
from sdp.train.data.order import GRANULES, EpochOrder, Ints, LaneRange, Route, RowGroups, Shuffle, shuffled


def views(dataset: LatentsDataset, counts: Ints) -> list[LatentsDataset]:
    """Return a view of the dataset for each bucket, given the rows of each row group (line) and bucket (column)."""
    result = []
    for bucket, shape in enumerate(dataset.shapes):
        if counts[:, bucket].any():
            row_groups = replace(dataset.row_groups, rows=counts[:, bucket])
            latents = replace(dataset.latents, shape=shape)
            result.append(replace(dataset, row_groups=row_groups, latents=latents, bucket=bucket))
    return result


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


@dataclass(frozen=True)
class GranulePlan:
    """The plan of a dataset whose rows have several shapes. Its buckets count as datasets."""

    row_groups: tuple[RowGroups, ...]
    """Those of each bucket."""
    seed: int
    shuffle: Shuffle
    granule: int
    """Rows of a micro-batch."""
    _positions: dict[int, int] = field(default_factory=dict)
    """Positions of an epoch, by its number of lanes; kept because every step asks for them."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(int(groups.rows.sum()) for groups in self.row_groups)

    @property
    def shapes(self) -> int:
        """The number of shapes of latents."""
        return len(self.row_groups)

    def positions(self, start: EpochStart) -> int:
        """Return the number of positions in an epoch, with the padding of each bucket's last granules."""
        if start.lanes not in self._positions:
            orders = self._orders(0, start)
            of_a_lane = int(self._counts(orders, 0).sum())  # of the first, since no other has more in any bucket
            self._positions[start.lanes] = orders[0].lanes * of_a_lane * self.granule
        return self._positions[start.lanes]

    def after(self, _: int, start: EpochStart) -> EpochStart:
        """Return the start of the next epoch."""
        return start

    def steps(self, epoch: int, start: EpochStart, route: Route) -> Iterator[list[LaneRange]]:
        """Yield a worker's granules of each step to the epoch's end. All workers have the same number of steps."""
        orders, drawn = self._orders(epoch, start), dict[int, tuple[Ints, Ints]]()
        last, step = self.positions(start) // self.granule, route.batch_size // self.granule
        for at in range(route.position // self.granule, last, step):
            granules = []
            # A granule's number decides its worker, so each worker keeps to its own lanes.
            for number in range(at + (route.rank - at) % route.world, min(at + step, last), route.world):
                place, lane = divmod(number, orders[0].lanes)
                if lane not in drawn:
                    drawn[lane] = self._draw(orders, lane)
                buckets, starts = drawn[lane]
                if place < len(buckets):  # otherwise the lane has no more
                    order, begin = orders[buckets[place]], int(starts[place])
                    end = min(begin + self.granule, order.lane_rows(lane))
                    granules.append(LaneRange(order.lane(lane), begin, end))
            yield granules

    def _orders(self, epoch: int, start: EpochStart) -> list[EpochOrder]:
        shuffle = self.shuffle.with_lanes(start.lanes)
        return [EpochOrder(self.seed, epoch, groups, shuffle, n) for n, groups in enumerate(self.row_groups)]

    def _counts(self, orders: list[EpochOrder], lane: int) -> Ints:
        """Return the number of granules of a lane, by bucket."""
        return np.array([-(-order.lane_rows(lane) // self.granule) for order in orders], np.int64)

    def _draw(self, orders: list[EpochOrder], lane: int) -> tuple[Ints, Ints]:
        """Return a lane's granules in order: the bucket of each, and its first row in the bucket's lane."""
        counts = self._counts(orders, lane)
        buckets = np.repeat(np.arange(len(counts)), counts)
        buckets = buckets[shuffled(len(buckets), self.seed, orders[0].epoch, GRANULES, lane)]
        starts = np.empty_like(buckets)
        for bucket, count in enumerate(counts.tolist()):
            starts[buckets == bucket] = np.arange(count) * self.granule
        return buckets, starts
