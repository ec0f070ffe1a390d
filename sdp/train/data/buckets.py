"""The reader of latents of several shapes, in batches of one shape each; see `granules`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from sdp.device import thread_pool
from sdp.model.checkpoints import EpochStart
from sdp.train.data.batch import Batch
from sdp.train.data.direct import DirectReader, Passes
from sdp.train.data.granules import Granules, count_positions
from sdp.train.data.order import LaneRange
from sdp.train.data.rows import batch_of_shapes


@dataclass(frozen=True)
class BucketReader(DirectReader):
    """A reader whose micro-batches have one shape each. Its datasets are the buckets of one dataset."""

    granule: int = field(kw_only=True)
    """Rows of a micro-batch."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(source.dataset.rows for source in self.datasets)

    @property
    def mixed(self) -> bool:
        return False

    def positions(self, start: EpochStart) -> int:
        """Return the number of positions in an epoch, with the padding of each bucket's last granules."""
        lanes = start.lanes or self.shape.lanes
        if lanes not in self._positions:
            shape = replace(self.shape, lanes=lanes)
            self._positions[lanes] = count_positions(self.datasets, self.seed, shape, self.granule)
        return self._positions[lanes]

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Positions of an epoch, by its number of lanes; cached because every step asks for them."""
        return {}

    def _batches(self, epoch: int, position: int, batch_size: int, begin: EpochStart) -> Iterator[Batch]:
        step = batch_size // self.granule
        share = -(-step // self.world)
        with thread_pool(self.device, self.threads, "sdp-read") as pool:
            passes = Passes(self, pool, begin)
            sequence = Granules([passes.order(n, epoch) for n in range(len(self.datasets))], self.granule)
            try:
                for start in range(position // self.granule, len(sequence), step):
                    # A granule's number decides its worker, so each worker keeps to its own lanes.
                    first = start + (self.rank - start) % self.world
                    numbers = range(first, min(start + step, len(sequence)), self.world)
                    granules = [granule for number in numbers if (granule := sequence[number]) is not None]
                    for bucket, lane_range in granules:
                        passes.lanes(bucket, epoch).request([lane_range])
                    yield self._batch(passes, epoch, granules, share)
                    for bucket, lane_range in granules:
                        passes.lanes(bucket, epoch).release_in(lane_range.lane, lane_range.stop)
            finally:
                passes.close()

    def _batch(self, passes: Passes, epoch: int, granules: list[tuple[int, LaneRange]], share: int) -> Batch:
        """Return a batch of these granules, filled up to `share` with empty ones."""
        parts = [
            (self.datasets[bucket].dataset.columns, list(passes.lanes(bucket, epoch).rows(lane_range)))
            for bucket, lane_range in granules
        ]
        parts += [(self.datasets[0].dataset.columns, [])] * (share - len(parts))
        return batch_of_shapes(parts, self.granule, pin=self.device.type == "cuda")
