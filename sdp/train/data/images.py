"""Images on their way to a batch: the process stage's transform and encoder, a slice of a row group at a time.

The result is what `sdp process` stores with `encode.latents: moments`. The trainer draws the VAE's sample from it, by
(seed, epoch, row), as it does with a dataset of moments. So a row's latent is the same to the last bit in every mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from sdp.config.process import usual_batch
from sdp.config.train import TrainConfig
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.scores import scores_of
from sdp.datasets.units import Unit, Work
from sdp.encode import table
from sdp.encode.chunk import Chunk
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.encode.table import RowShape
from sdp.encode.work import EncodeSpec
from sdp.errors import DatasetError
from sdp.families import read_latent_space, refuse_sides
from sdp.model.sources import LocalModel
from sdp.runners.stages import TRIES, PrepareStats
from sdp.sources.groups import RowGroup
from sdp.sources.pictures import Selection, open_pictures
from sdp.sources.pieces import Piece
from sdp.sources.reading import Columns, addresses
from sdp.storage import Storage
from sdp.train.data.columns import Column, RowColumns
from sdp.train.data.latents import select_parts
from sdp.train.data.order import RowGroups, Shuffle
from sdp.train.data.rows import Rows, blank_rows, items_of
from sdp.train.data.weights import RowWeights

if TYPE_CHECKING:
    from sdp.encode.encoder import Encoder

_SLICE_BYTES, _SLICE_ROWS = 50_000_000, 256
"""Maximum size of a slice, in bytes of pixels and in rows: a few encoder batches, small beside a worker's memory."""
_PER_ENCODER = 4
"""Slices in flight for each encoder: two at the encoder, one in transform, one finished and not yet fetched."""
_EVERYTHING = Work(Unit(0, 0, 1 << 62))


@dataclass(frozen=True)
class ImagesDataset:
    """The row groups of a complete images dataset, and the pipeline's stages for slices of them."""

    storage: Storage
    paths: tuple[str, ...]
    row_groups: RowGroups
    spec: EncodeSpec
    weights: RowWeights
    """The weights that are known in advance; rows of weight 0 are not encoded."""

    @property
    def resolution(self) -> int:
        return self.spec.recipe.resolutions[0]

    @property
    def columns(self) -> RowColumns:
        """The columns of an encoded row: latents and text."""
        shape = self.spec.shape
        values = shape.space.shape(self.resolution, moments=shape.content == "moments")
        latents = Column(table.column(shape, self.resolution), values, np.dtype(np.float16))
        return latents, Column(table.text_column(shape), shape.text.shape, shape.text.stored)

    @property
    def slice_rows(self) -> int:
        """Rows of a slice."""
        return max(16, min(_SLICE_ROWS, _SLICE_BYTES // (3 * self.resolution**2)))

    def prepare(self, item: "Slice | None") -> tuple[Any, PrepareStats]:
        """Read a slice and transform its needed rows to crops and tokens; None is the empty caption."""
        if item is None:
            return None, PrepareStats()
        spec = self.spec
        rows = addresses(item.piece, spec.storage)
        if len(rows) != len(item):
            uri = item.piece.groups[0].uri
            raise DatasetError(f"{uri}: not the file that the manifest lists; run sdp download again")
        wanted = item.needed & (self.weights(rows) > 0)
        if not wanted.any():
            none = Chunk(np.zeros(0, np.int64), [], np.zeros((0, 0), np.uint32), {}, np.zeros(0, np.int16))
            return Transformed(rows, none), PrepareStats()
        # The epoch goes into the seed, since crops and captions are drawn from seed and row alone.
        drawn = replace(spec, recipe=replace(spec.recipe, seed=spec.recipe.seed + (item.epoch << 40)))
        chunk, stats = drawn.prepare((item.piece, None if wanted.all() else rows[wanted]))
        return Transformed(rows, chunk), stats

    def load(self, device: str | None = None) -> "Encoder":
        """Load the process stage's encoder onto a device."""
        return self.spec.load_encoder(device)

    def work(self, worker: "Encoder", value: "Transformed | None") -> Any:
        """Return the rows of a transformed slice, or the embedding of the empty caption.

        Rows that are not needed, filtered or bad are zeros with weight 0.
        """
        if value is None:
            return self.spec.embed_empty(worker)
        chunk = value.chunk
        if not len(chunk):
            return self.unused(value.rows, chunk.outcomes)
        encoded = worker(chunk)
        result, good = self.unused(value.rows, encoded.outcomes), encoded.good
        order = np.argsort(result.rows, kind="stable")
        at = order[np.searchsorted(result.rows, chunk.rows[good], sorter=order)]  # the places of the good rows
        (group,) = encoded.latents[self.resolution]
        result.weights[at] = 1
        result.latents[at] = items_of(group.values[good[group.positions]])
        text = chunk.tokens if encoded.text is None else encoded.text
        result.text[at] = items_of(text[good].astype(self.spec.shape.text.stored, copy=False))
        return result

    def unused(self, rows: NDArray[np.int64], outcomes: Sequence[Outcome]) -> Rows:
        """Return these rows with weight 0, and the outcomes that failed as their bad ones."""
        bad = {outcome.row: outcome for outcome in outcomes if outcome.outcome == FAILED}
        return replace(blank_rows(len(rows), self.columns), rows=rows, bad=bad)


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a row group that are transformed and encoded together."""

    piece: Piece
    """The same rows for the process stage."""
    epoch: int
    needed: NDArray[np.bool_]
    """The rows to encode; the others are skipped."""

    @staticmethod
    def of(uri: str, group: int, group_rows: int, skip: int, epoch: int, needed: NDArray[np.bool_]) -> "Slice":
        """Return the slice of a row group that begins at row `skip` and has as many rows as `needed`."""
        row_group = RowGroup(uri, group, group_rows, None)
        return Slice(Piece(_EVERYTHING, 0, (row_group,), skip, len(needed)), epoch, needed)

    def __len__(self) -> int:
        return self.piece.take

    def narrow(self) -> "list[Slice]":
        """Return the same rows in smaller slices, to find the one that kills its worker."""
        parts = [(part, part.skip - self.piece.skip) for part in self.piece.narrow()]
        return [replace(self, piece=part, needed=self.needed[at : at + part.take]) for part, at in parts]


@dataclass(frozen=True, slots=True)
class Transformed:
    """A slice's crops and tokens."""

    rows: NDArray[np.int64]
    """All addresses of the slice, in order."""
    chunk: Chunk
    """The crops, and the reasons why rows have none."""


def open_columns(config: TrainConfig, dataset: Dataset) -> Columns:
    """Return the columns of an images dataset that are encoded, with the tables joined to them."""
    section = config.source
    selection = Selection(
        caption=section.caption_column, text=section.caption, tables=section.tables, scores=scores_of(config.filters)
    )
    return open_pictures("source", section.uri, config.storage.options(), selection, dataset).columns


def open_images(
    config: TrainConfig, dataset: Dataset, model: LocalModel, columns: Columns | None = None
) -> ImagesDataset:
    """Open an images dataset, to be encoded with a model; `columns` are needed only where this process reads it."""
    _, paths, groups = select_parts(dataset, config.limit)
    spec = _encode_spec(config, dataset, model, columns or Columns())
    weights = RowWeights(config.data.holdout, config.limit, repeated=dataset.repeated_rows)
    return ImagesDataset(dataset.storage, paths, groups, spec, weights)


def crashed_slice(images: ImagesDataset, data_slice: Slice, detail: str) -> Rows:
    """Return the rows of a slice with the needed ones recorded as crashed, because it killed its worker each time."""
    rows = addresses(data_slice.piece, images.spec.storage)
    dead = [Outcome(row, FAILED, "crashed", detail, attempts=TRIES) for row in rows[data_slice.needed].tolist()]
    return images.unused(rows, dead)


def slices_ahead(config: TrainConfig, images: ImagesDataset, world: int) -> int:
    """Return how many slices each of `world` trainers has in flight: a window, and a share of the encoders' queue."""
    groups = images.row_groups.rows[: Shuffle().row_groups]
    window = int(sum(-(-rows // images.slice_rows) for rows in groups.tolist()))
    return window + -(-_PER_ENCODER * config.encode.most // world)


def _encode_spec(config: TrainConfig, dataset: Dataset, model: LocalModel, columns: Columns) -> EncodeSpec:
    side = config.data.resolution
    batch = config.encode.batch_size or usual_batch(side)
    space = read_latent_space(model.path, config.model.source)
    refuse_sides("data.resolution", model.path, [side])
    content: Literal["sample", "moments"] = "moments" if space.drawn else "sample"
    text = model.family.text(model.path, embedded=config.text_encoded)
    return EncodeSpec(
        model=replace(model.source, sha256=model.digest),
        recipe=Recipe((side,), config.transform.crop, config.seed),
        settings=EncoderSettings(config.seed, content, config.encode.dtype, {side: batch}, config.encode.compile),
        shape=RowShape((side,), space, content, text),
        columns=columns,
        storage=config.storage.options(),
        output=dataset.storage,
        foreign=False,
    )
