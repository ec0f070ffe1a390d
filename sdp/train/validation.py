"""The validation loss, by timestep.

The rows and their noise are the same every time, whatever the number of workers, so two figures differ only by the
model. Each row is noised once in each range of timesteps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sdp.config.train import TrainConfig
from sdp.datasets.manifest import open_dataset
from sdp.errors import DatasetError
from sdp.storage import open_storage
from sdp.train.data.batch import Batch
from sdp.train.data.granules import views
from sdp.train.data.latents import GroupReader, LatentsDataset, open_latents
from sdp.train.data.order import RowRange
from sdp.train.data.rows import Loader, Rows, ShapePart, batch_of_shapes, empty_rows
from sdp.train.data.sources import open_sources
from sdp.train.data.weights import RowWeights, Weigh, held_out, row_weights
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.step import Conditioning, Objective, draw, losses_at
from sdp.train.world import World

TIMESTEP_RANGES = 10
"""Ranges of timesteps of nearly equal length, in each of which every row is noised once."""
_SEED = 0x5D9
"""The seed of the noise, which is the same in all runs, so that they can be compared."""

Selected = tuple[RowRange, NDArray[np.bool_]]
"""A row group, and a mask of its rows to measure on."""


def validation_rows(config: TrainConfig) -> tuple[LatentsDataset, Weigh]:
    """Return a dataset, and the weights of its rows: above 0 for those to measure on.

    They are all rows of `evaluate.source`, or, without one, the rows that training holds out.
    """
    if config.evaluate.source is not None:
        dataset = open_dataset(open_storage(config.evaluate.source, config.storage.options()), "latents")
        return open_latents(dataset, config.data.resolution), row_weights(dataset.storage, 0.0, None)
    own = open_sources(config).all[0]
    storage = own.written.storage if own.written is not None else None
    weigh = row_weights(storage, 0.0, config.limit) if storage is not None else RowWeights(0.0, config.limit)
    return own.dataset, lambda rows: weigh(rows) * held_out(rows, config.data.holdout)


def load_validation_batch(latents: LatentsDataset, weigh: Weigh, rows: int, world: World, batch_size: int) -> Batch:
    """Load this worker's share of `rows` rows, from row groups in a random order.

    The workers' shares together do not depend on their number. All workers have the same number of batches, padded with
    rows of weight 0.
    """
    reader = GroupReader(latents)
    selected = list(_select(reader, weigh, rows, world))
    if not selected:
        uri = latents.files.uri_of("")
        raise DatasetError(f"{uri}: no rows are held out from training; raise data.holdout, or use another dataset")
    parts: list[ShapePart] = []
    for view, ranges in _by_shape(reader, selected[world.rank :: world.size]):
        loaded = _load(GroupReader(view), ranges)
        for start in range(0, len(loaded), batch_size):
            parts.append((view.columns, [loaded.slice(start, min(start + batch_size, len(loaded)))]))
    most = max(world.gather(len(parts)))
    return batch_of_shapes([*parts, *[(latents.columns, [])] * (most - len(parts))], batch_size)


def _load(reader: GroupReader, ranges: Sequence[Selected]) -> Rows:
    count = sum(int(mask.sum()) for _, mask in ranges)
    into = empty_rows(count, reader.dataset.columns)
    loader = Loader(reader, lambda rows: np.ones(len(rows), np.float32))
    loader.load([row_range for row_range, _ in ranges], np.arange(count), into, [mask for _, mask in ranges])
    return into


def _by_shape(reader: GroupReader, ranges: Sequence[Selected]) -> Iterator[tuple[LatentsDataset, Sequence[Selected]]]:
    """Yield a view of the dataset for each shape of its crops, with the rows to measure on."""
    latents = reader.dataset
    if not latents.shapes:
        yield latents, ranges
        return
    counts = np.zeros((len(latents.row_groups), len(latents.shapes)), np.int64)
    buckets = [reader.buckets(row_range.row_group) for row_range, _ in ranges]
    for (row_range, _), of_rows in zip(ranges, buckets, strict=True):
        counts[row_range.row_group] = np.bincount(of_rows, minlength=len(latents.shapes))
    for view in views(latents, counts):
        own = [
            (RowRange(each.row_group, 0, int(view.row_groups.rows[each.row_group])), mask[of_rows == view.bucket])
            for (each, mask), of_rows in zip(ranges, buckets, strict=True)
        ]
        yield view, [(row_range, mask) for row_range, mask in own if mask.any()]


def _select(reader: GroupReader, weigh: Weigh, rows: int, world: World) -> Iterator[Selected]:
    """Yield row groups with the rows to measure on, `rows` in all; each worker reads the addresses of its share."""
    counts = reader.dataset.row_groups.rows
    order = np.random.RandomState(_SEED).permutation(len(counts)).tolist()
    ranges = [RowRange(row_group, 0, int(counts[row_group])) for row_group in order]
    for start in range(0, len(ranges), world.size):
        present = ranges[start : start + world.size]
        own = [weigh(reader.addresses(row_range)) > 0 for row_range in present[world.rank : world.rank + 1]]
        for row_range, mask in zip(present, chain.from_iterable(world.gather(own)), strict=True):
            mask &= np.cumsum(mask) <= rows
            rows -= int(mask.sum())
            if mask.any():
                yield row_range, mask
        if not rows:
            return


@dataclass(frozen=True)
class Validation:
    """A measured validation loss."""

    edges: tuple[int, ...]
    """The beginnings of the timestep ranges, and the end of the last."""
    means: tuple[float, ...]
    """The mean loss of each range."""
    mean: float

    @property
    def by_timestep(self) -> dict[str, float]:
        """The mean loss by range: `{"0-99": 0.31, …}`."""
        ranges = zip(pairwise(self.edges), self.means, strict=True)
        return {f"{low}-{high - 1}": mean for (low, high), mean in ranges}


@torch.no_grad()
def measure(
    networks: nn.Module,
    objective: Objective,
    conditioning: Conditioning,
    batch: Batch,
    *,
    batch_size: int,
    world: World,
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Validation:
    """Return the loss over all workers' rows; each worker passes a batch of the same length."""
    buckets = TIMESTEP_RANGES
    edges = tuple(objective.process.parts * number // buckets for number in range(buckets + 1))
    totals = torch.zeros(buckets + 1, dtype=torch.float64, device=world.device)
    for micro_batch in batch.split(batch_size):
        micro_batch = micro_batch.to(world.device)
        by_range = []
        with forward():
            text = conditioning.text_or_empty(micro_batch, torch.zeros_like(micro_batch.weights, dtype=torch.bool))
            for number, (low, high) in enumerate(pairwise(edges)):
                random = RowRandom(_SEED, number, micro_batch.rows)
                times = objective.process.times_in(partial(random.integers, Purpose.TIMESTEP), low, high)
                draws = draw(objective, micro_batch, random)._replace(times=times, kept=None)
                each = losses_at(networks, objective, micro_batch, draws, text)
                by_range.append(each.double() * micro_batch.weights)
        losses = torch.stack(by_range, dim=1)
        totals[:buckets] += losses.sum(dim=0)
        totals[buckets] += (micro_batch.weights > 0).sum()
    *sums, count = world.sum_of(totals).tolist()
    means = tuple(s / count for s in sums)
    return Validation(edges, means, sum(means) / buckets)
