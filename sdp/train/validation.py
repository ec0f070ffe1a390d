"""The loss on rows that are not trained on, by timestep.

The rows and their noise are the same every time, whoever measures and however many do: what differs between two
figures is the model alone. A row is noised once in each range of timesteps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdp.config import TrainConfig
from sdp.datasets.manifest import open_dataset
from sdp.errors import DatasetError
from sdp.storage import StorageOptions, open_storage
from sdp.train.data.batch import Batch
from sdp.train.data.buckets import join, views
from sdp.train.data.latents import GroupReader, LatentsDataset, open_latents
from sdp.train.data.loading import Loader
from sdp.train.data.order import Ints, RowRange
from sdp.train.data.rows import Rows, batch_of, empty_rows
from sdp.train.data.sources import open_sources
from sdp.train.data.weights import RowWeights, Weigh, held_out, row_weights
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.step import Conditioning, Objective, losses_at
from sdp.train.world import World

_SEED = 0x5D9
"""Of the noise; no run's seed changes it, so that runs can be compared."""


@dataclass(frozen=True)
class Unseen:
    """The rows of a dataset that may be measured on."""

    latents: LatentsDataset
    weigh: Callable[[], Weigh]
    """The weights but for the hold-out: takedowns and a limit."""
    share: float | None = None
    """Of the addresses those that are held out; None: all of them."""

    def counts(self) -> Callable[[Ints], NDArray[np.bool_]]:
        """For some addresses whether they are to be measured on, as of now."""
        return partial(_counts, self.weigh(), self.share)


def _counts(weigh: Weigh, share: float | None, rows: Ints) -> NDArray[np.bool_]:
    counts = weigh(rows) > 0
    return counts if share is None else counts & held_out(rows, share)


def unseen_of(config: TrainConfig, source: str | None) -> Unseen:
    """All rows of a latents dataset, or without one what the training keeps of its own."""
    if source is not None:
        return all_of(source, config.data.resolution, config.storage.options())
    own = open_sources(config).all[0]
    weigh: Callable[[], Weigh] = partial(RowWeights, 0.0, config.limit)
    if own.dataset is not None:
        weigh = partial(row_weights, own.dataset.storage, 0.0, config.limit)
    return Unseen(own.weighted.dataset, weigh, config.data.holdout)


def all_of(source: str, resolution: int, options: StorageOptions) -> Unseen:
    """Every row of a latents dataset."""
    dataset = open_dataset(open_storage(source, options), "latents")
    return Unseen(open_latents(dataset, resolution), partial(row_weights, dataset.storage, 0.0, None))


def load_unseen(unseen: Unseen, rows: int, world: World, batch_size: int) -> Batch:
    """This worker's share of the first so many of them, row groups being taken in a drawn order.

    Together the workers have the same rows however many they are; each has equally many batches, filled up with
    weightless rows.
    """
    latents, reader = unseen.latents, GroupReader(unseen.latents)
    mine: list[tuple[RowRange, NDArray[np.bool_]]] = []
    for row_range, kept in _chosen(latents, reader, unseen.counts(), rows, world):
        if kept.any():
            mine.append((row_range, kept))
    count = sum(int(kept.sum()) for _, kept in mine)
    counts = [int(one) for (one,) in world.collect([float(count)])]
    if not sum(counts):
        uri = latents.files.uri_of("")
        raise DatasetError(
            f"{uri}: none of its rows is kept from training; raise data.holdout, or take another dataset"
        )
    if latents.shapes:
        return _by_shape(latents, reader, mine, world, batch_size)
    return batch_of(latents.columns, -(-max(counts) // batch_size) * batch_size, [_load(reader, mine)])


def _load(reader: GroupReader, ranges: Sequence[tuple[RowRange, NDArray[np.bool_]]]) -> Rows:
    count = sum(int(kept.sum()) for _, kept in ranges)
    into = empty_rows(count, reader.dataset.columns)
    loader = Loader(reader, lambda rows: np.ones(len(rows), np.float32), _SEED, 0)
    loader.load([row_range for row_range, _ in ranges], np.arange(count), into, [kept for _, kept in ranges])
    return into


def _by_shape(
    latents: LatentsDataset,
    reader: GroupReader,
    ranges: Sequence[tuple[RowRange, NDArray[np.bool_]]],
    world: World,
    batch_size: int,
) -> Batch:
    """The rows of some ranges in batches of one shape each."""
    counts = np.zeros((len(latents.row_groups), len(latents.shapes)), np.int64)
    buckets = [reader.buckets(row_range.row_group) for row_range, _ in ranges]
    for (row_range, _), of_rows in zip(ranges, buckets, strict=True):
        counts[row_range.row_group] = np.bincount(of_rows, minlength=len(latents.shapes))
    parts = []
    for view in views(latents, counts):
        mine = [
            (
                RowRange(row_range.row_group, 0, int(view.row_groups.rows[row_range.row_group])),
                kept[of_rows == view.bucket],
            )
            for (row_range, kept), of_rows in zip(ranges, buckets, strict=True)
        ]
        rows = _load(GroupReader(view), [(row_range, kept) for row_range, kept in mine if kept.any()])
        for start in range(0, len(rows), batch_size):
            some = rows.slice(start, min(start + batch_size, len(rows)))
            parts.append(batch_of(view.columns, batch_size, [some]))
    most = max(int(count) for (count,) in world.collect([float(len(parts))]))
    return join([*parts, *[batch_of(latents.columns, batch_size, [])] * (most - len(parts))])


def _chosen(
    latents: LatentsDataset, reader: GroupReader, counts: Callable[[Ints], NDArray[np.bool_]], rows: int, world: World
) -> Iterator[tuple[RowRange, NDArray[np.bool_]]]:
    """This worker's row groups, and which rows of each; the addresses alone are read."""
    order = np.random.RandomState(_SEED).permutation(len(latents.row_groups))
    found = 0
    for start in range(0, len(order), world.size):
        kept = np.zeros(0, np.bool_)
        if start + world.rank < len(order):
            row_group = int(order[start + world.rank])
            row_range = RowRange(row_group, 0, int(latents.row_groups.rows[row_group]))
            kept = counts(reader.addresses(row_range))
        sums = [int(count) for (count,) in world.collect([float(kept.sum())])]
        before = found + sum(sums[: world.rank])
        found += sum(sums)
        if len(kept):
            yield row_range, kept & (before + np.cumsum(kept) <= rows)
        if found >= rows:
            return


@dataclass(frozen=True)
class Validation:
    """What was measured."""

    edges: tuple[int, ...]
    """Where the ranges of timesteps begin, and the last one ends."""
    means: tuple[float, ...]
    """Of each range."""
    mean: float
    error: float
    """The standard error of the mean, as far as it comes from the choice of rows."""
    rows: int

    @property
    def by_timestep(self) -> dict[str, float]:
        """`{"0-99": 0.31, …}`"""
        ranges = zip(pairwise(self.edges), self.means, strict=True)
        return {f"{low}-{high - 1}": mean for (low, high), mean in ranges}


def measure(
    networks: nn.Module,
    objective: Objective,
    conditioning: Conditioning,
    batch: Batch,
    *,
    buckets: int,
    batch_size: int,
    world: World,
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Validation:
    """The loss of the workers' rows, all together; of each worker there are equally many."""
    edges = edges_of(len(objective.schedule), buckets)
    totals = torch.zeros(buckets + 3, dtype=torch.float64, device=world.device)
    for micro_batch in batch.split(batch_size):
        micro_batch = micro_batch.to(world.device)
        each = _losses(networks, objective, conditioning, micro_batch, edges, forward)
        rows = each.mean(dim=1)[micro_batch.weights > 0]
        totals[:buckets] += each.sum(dim=0)
        totals[buckets:] += torch.stack([rows.sum(), rows.square().sum(), torch.full_like(rows.sum(), len(rows))])
    *sums, total, squares, count = world.sum(totals).tolist()
    mean = total / count
    variance = max(0.0, squares / count - mean**2) * count / max(1.0, count - 1)
    return Validation(edges, tuple(s / count for s in sums), mean, (variance / count) ** 0.5, round(count))


def edges_of(timesteps: int, buckets: int) -> tuple[int, ...]:
    """Ranges as equal as can be."""
    return tuple(timesteps * n // buckets for n in range(buckets + 1))


@torch.no_grad()
def _losses(
    networks: nn.Module,
    objective: Objective,
    conditioning: Conditioning,
    batch: Batch,
    edges: Sequence[int],
    forward: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """The loss of each row in each range of timesteps; 0 of rows that only fill up."""
    losses = []
    with forward():
        text = conditioning.states(batch, torch.zeros_like(batch.weights, dtype=torch.bool))
        for number, (low, high) in enumerate(pairwise(edges)):
            random = RowRandom(_SEED, number, batch.rows)
            timesteps = low + random.integers(Purpose.TIMESTEP, high - low)
            losses.append(losses_at(networks, objective, batch, random, timesteps, text).double() * batch.weights)
    return torch.stack(losses, dim=1)
