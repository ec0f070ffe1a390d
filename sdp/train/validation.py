"""The validation loss, by timestep.

The rows and their noise are the same every time, whatever the number of workers, so two figures differ only by the
model. Each row is noised once in each range of timesteps.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from sdp.config.train import TrainConfig
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.draws import held_out
from sdp.datasets.manifest import open_dataset
from sdp.errors import DatasetError
from sdp.families import ALL_TOKENS, TextSpace
from sdp.storage import open_storage
from sdp.train.data.batch import Batch, ShapePart, batch_of_shapes
from sdp.train.data.granules import views
from sdp.train.data.latents import GroupReader, LatentsDataset, open_latents
from sdp.train.data.order import Ints
from sdp.train.data.rows import blank_rows, joined
from sdp.train.data.sources import open_sources
from sdp.train.data.weights import RowWeights, Weigh, row_weights
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.step import draw, losses_at
from sdp.train.trainer import Trainer
from sdp.train.world import World

TIMESTEP_RANGES = 10
"""Ranges of timesteps of nearly equal length, in each of which every row is noised once."""
_SEED = 0x5D9
"""The seed of the noise, which is the same in all runs, so that they can be compared."""


def validation_rows(config: TrainConfig) -> tuple[LatentsDataset, Weigh]:
    """Return a dataset, and the weights of its rows: above 0 for those to measure on.

    They are all rows of `evaluate.source`, or, without one, the rows that training holds out.
    """
    if config.evaluate.source is not None:
        dataset = open_dataset(open_storage(config.evaluate.source, config.storage.options()), "latents")
        return open_latents(dataset, config.data.resolution), row_weights(dataset.storage, 0.0, None)
    own = open_sources(config).all[0]
    weigh = row_weights(own.written.storage, 0.0, config.limit) if own.written else RowWeights(0.0, config.limit)
    return own.dataset, lambda rows: weigh(rows) * held_out(rows, config.data.holdout)


def load_validation_batch(
    latents: LatentsDataset, weigh: Weigh, rows: int, world: World, batch_size: int, space: TextSpace = ALL_TOKENS
) -> Batch:
    """Load this worker's share of `rows` rows, from row groups in a random order.

    The workers' shares together do not depend on their number. All workers have the same number of batches, padded with
    rows of weight 0.
    """
    selected = list(_select(latents, weigh, rows))
    if not selected:
        uri = latents.files.uri_of("")
        raise DatasetError(f"{uri}: no rows are held out from training; raise data.holdout, or use another dataset")
    own = selected[world.rank :: world.size]
    parts: list[ShapePart] = []
    for view in _by_shape(latents, [row_group for row_group, _ in own]):
        reader, loaded = GroupReader(view), [blank_rows(0, view.columns)]
        for row_group, wanted in own:
            if view.row_groups.rows[row_group]:
                group = reader.rows(row_group)
                loaded.append(group[np.isin(group.rows, wanted)])
        shape_rows = joined(loaded)
        shape_rows.weights[:] = 1
        parts += [(view.columns, [shape_rows[at : at + batch_size]]) for at in range(0, len(shape_rows), batch_size)]
    most = max(world.gather(len(parts)))
    return batch_of_shapes([*parts, *[(latents.columns, [])] * (most - len(parts))], batch_size, space=space)


def _select(latents: LatentsDataset, weigh: Weigh, rows: int) -> Iterator[tuple[int, Ints]]:
    """Yield row groups with the addresses to measure on, `rows` in all."""
    order = np.random.RandomState(_SEED).permutation(len(latents.row_groups)).tolist()
    for row_group, addresses in zip(order, ordered_map(GroupReader(latents).addresses, order), strict=True):
        wanted = addresses[weigh(addresses) > 0][:rows]
        rows -= len(wanted)
        if len(wanted):
            yield row_group, wanted
        if not rows:
            return


def _by_shape(latents: LatentsDataset, row_groups: Sequence[int]) -> list[LatentsDataset]:
    """Return a view of some row groups for each shape of their crops."""
    if not latents.shapes:
        return [latents]
    reader, counts = GroupReader(latents), np.zeros((len(latents.row_groups), len(latents.shapes)), np.int64)
    for row_group in row_groups:
        counts[row_group] = np.bincount(reader.buckets(row_group), minlength=len(latents.shapes))
    return views(latents, counts)


@torch.no_grad()
def measure(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Return the mean loss over all workers' rows by range of timesteps, `{"0-99": 0.31, …}`, and that of "all".

    Each worker passes a batch of the same length.
    """
    objective, world, buckets = trainer.objective, trainer.world, TIMESTEP_RANGES
    edges = tuple(objective.process.parts * number // buckets for number in range(buckets + 1))
    totals = torch.zeros(buckets + 1, dtype=torch.float64, device=world.device)
    for micro_batch in batch.split(trainer.config.data.batch_size):
        micro_batch = micro_batch.to(world.device)
        by_range = []
        with trainer.strategy.forward():
            dropped = torch.zeros_like(micro_batch.weights, dtype=torch.bool)
            text = trainer.conditioning.text_or_empty(micro_batch, dropped)
            for number, (low, high) in enumerate(pairwise(edges)):
                random = RowRandom(_SEED, torch.full_like(micro_batch.rows, number), micro_batch.rows)
                times = objective.process.times_in(partial(random.integers, Purpose.TIMESTEP), low, high)
                draws = draw(objective, micro_batch, random)._replace(times=times, kept=None)
                each = losses_at(trainer.networks, objective, micro_batch, draws, text)
                by_range.append(each.double() * micro_batch.weights)
        losses = torch.stack(by_range, dim=1)
        totals[:buckets] += losses.sum(dim=0)
        totals[buckets] += (micro_batch.weights > 0).sum()
    for module in trainer.networks.modules():  # without a backward pass, fsdp keeps the gathered weights
        if isinstance(module, FSDPModule):
            module.reshard()
    *sums, count = world.sum_of(totals).tolist()
    means = {f"{low}-{high - 1}": s / count for (low, high), s in zip(pairwise(edges), sums, strict=True)}
    return {**means, "all": sum(means.values()) / buckets}
