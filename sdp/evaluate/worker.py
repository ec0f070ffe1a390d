"""What an evaluator does with a unit: look at its pictures and publish their features as a part."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.repeated import REASON, Repeated
from sdp.datasets.units import Work
from sdp.device import choose_device
from sdp.encode.chunk import SourceRow
from sdp.encode.reading import Columns, Piece, read_piece
from sdp.errors import SdpError
from sdp.evaluate.layout import CLIP, FEATURES, KIND
from sdp.evaluate.networks import Clip, Network, Prepared, Rows, load_network
from sdp.imaging import MAX_PIXELS, Pixels, RowError, decode
from sdp.model import networks
from sdp.model.networks import FeatureNetwork
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox
from sdp.storage import Storage, StorageOptions

LAYOUT = Layout(row_group_rows=1024)
Task = tuple[str, Work, Sequence[Piece]]
"""The name of a set, a unit of it, and what is to be read."""


@dataclass(frozen=True)
class Orders:
    """What every evaluator is told about one set of pictures."""

    features: FeatureNetwork | None
    clip: FeatureNetwork | None
    columns: Columns
    resize: str
    batch_size: int
    threads: int
    output: Storage
    storage: StorageOptions
    taken_down: bytes = b""
    """Addresses, as a serialised bitmap."""
    repeated: Repeated | None = None
    foreign: bool = True
    """Whether the pictures are not of a dataset of sdp, and so are decoded by none but sandboxed decoders."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A picture as the networks take it."""

    row: int
    views: tuple[Prepared, ...]
    """For each network."""
    caption: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the networks made of some pictures."""

    rows: Sequence[int]
    features: Rows | None
    scores: NDArray[np.float32] | None
    """NaN where there is no caption to go with."""


class Worker:
    """One evaluator, for units of several sets: a network is loaded with the first unit that needs it."""

    def __init__(self, orders: Mapping[str, Orders]) -> None:
        self._orders = orders
        self._loaded: dict[str, Network] = {}
        self._sandbox: Sandbox | None = None

    def make(self, task: Task, seen: Callable[[int], None] = lambda _: None) -> tuple[str, PartInfo]:
        """Look at the pictures of a unit of a set; `seen` is called with how many were done, now and then."""
        name, work, pieces = task
        orders = self._orders[name]
        if orders.foreign and self._sandbox is None:
            self._sandbox = Sandbox(child.pixels, MAX_PIXELS, orders.threads)
        return name, _Look(orders, self._networks(orders), self._sandbox).at(work, pieces, seen)

    def _networks(self, orders: Orders) -> dict[str, Network]:
        """Those that look at a set, by their digests."""
        device = choose_device()
        wanted: dict[str, Network] = {}
        for key, network in (("features.model", orders.features), ("clip.model", orders.clip)):
            if network is None:
                continue
            if network.digest not in self._loaded:
                here = networks.find(network.source, key, storage=orders.storage)  # this may be another machine
                self._loaded[network.digest] = load_network(here, orders.resize, device)
            wanted[network.digest] = self._loaded[network.digest]
        return wanted


class _Look:
    """Looks at one unit."""

    def __init__(self, orders: Orders, networks: Mapping[str, Network], sandbox: Sandbox | None) -> None:
        self._orders, self._networks, self._sandbox = orders, networks, sandbox
        self._batch = orders.batch_size
        self._taken_down = BitMap64.deserialize(orders.taken_down) if orders.taken_down else BitMap64()

    def at(self, work: Work, pieces: Sequence[Piece], seen: Callable[[int], None]) -> PartInfo:
        outcomes: list[Outcome] = []
        found: list[_Seen] = []
        batch: list[_Ready] = []
        columns, storage = self._orders.columns, self._orders.storage
        pictures = (row for piece in pieces for row in read_piece(piece, columns, options=storage))
        for each in ordered_map(self._prepare, pictures, self._orders.threads):
            if isinstance(each, Outcome):
                outcomes.append(each)
                continue
            batch.append(each)
            if len(batch) >= self._batch:
                found += self._look(batch, outcomes)
                seen(len(batch))
                batch = []
        found += self._look(batch, outcomes)
        table = self._table(found).sort_by("row")
        outcomes += [Outcome(row, WRITTEN) for row in table["row"].to_pylist()]
        return write_part(self._orders.output, KIND, work, table, account_table(outcomes), layout=LAYOUT)

    def _prepare(self, picture: SourceRow) -> _Ready | Outcome:
        row = picture.row
        if row in self._taken_down:
            return Outcome(row, FILTERED, "tombstone")
        if self._orders.repeated is not None and row in self._orders.repeated:
            return Outcome(row, FILTERED, REASON)
        try:
            if picture.image is None:
                raise RowError("empty", "the row has no image")
            pixels = self._decoded(picture.image)
            views = tuple(network.prepare(pixels) for network in self._networks.values())
        except RowError as error:
            return Outcome(row, FAILED, error.reason, error.detail)
        return _Ready(row, views, (picture.caption or "").strip())

    def _decoded(self, data: bytes | memoryview) -> Pixels:
        if not self._orders.foreign:
            return decode(data).pixels
        assert self._sandbox is not None
        return child.unpacked(*self._sandbox(data))

    def _look(self, batch: Sequence[_Ready], outcomes: list[Outcome]) -> list[_Seen]:
        """In as many goes as memory has room for."""
        seen: list[_Seen] = []
        at = 0
        while at < len(batch):
            some = batch[at : at + self._batch]
            try:
                seen.append(self._finite(self._features(some), outcomes))
                at += len(some)
            except torch.OutOfMemoryError as error:
                if self._batch == 1:
                    raise SdpError(
                        "scaling.batch_size: no memory for a single picture; take a larger GPU (scaling.accelerator)"
                    ) from error
                self._batch //= 2
        return seen

    def _features(self, batch: Sequence[_Ready]) -> _Seen:
        orders = self._orders
        rows = {
            digest: network.look([each.views[n] for each in batch])
            for n, (digest, network) in enumerate(self._networks.items())
        }
        scores = None
        if orders.clip is not None:
            clip = self._networks[orders.clip.digest]
            assert isinstance(clip, Clip)
            captioned = np.array([bool(each.caption) for each in batch])
            scores = np.full(len(batch), np.nan, np.float32)
            scores[captioned] = clip.scores(
                rows[orders.clip.digest][captioned], [each.caption for each in batch if each.caption]
            )
        return _Seen([each.row for each in batch], rows[orders.features.digest] if orders.features else None, scores)

    def _finite(self, seen: _Seen, outcomes: list[Outcome]) -> _Seen:
        """Without what came to NaN or infinity."""
        if seen.features is None:
            return seen
        good = np.logical_and.reduce(np.isfinite(seen.features), axis=1)
        outcomes += [Outcome(row, FAILED, "not_finite") for row, ok in zip(seen.rows, good, strict=True) if not ok]
        rows = [row for row, ok in zip(seen.rows, good, strict=True) if ok]
        return _Seen(rows, seen.features[good], None if seen.scores is None else seen.scores[good])

    def _table(self, found: Sequence[_Seen]) -> pa.Table:
        orders = self._orders
        rows = pa.array([row for seen in found for row in seen.rows], pa.int64())
        columns, schema = [rows], [pa.field("row", pa.int64(), nullable=False)]
        if orders.features is not None:
            width = self._networks[orders.features.digest].width
            empty = np.zeros((0, width), np.float32)
            features = np.concatenate([empty, *(seen.features for seen in found if seen.features is not None)])
            kind = pa.binary(4 * width)
            data = pa.py_buffer(np.ascontiguousarray(features, np.float32))
            columns.append(pa.FixedSizeBinaryArray.from_buffers(kind, len(features), [None, data]))
            metadata = {"shape": json.dumps([width]), "dtype": "float32"}
            schema.append(pa.field(FEATURES, kind, nullable=False, metadata=metadata))
        if orders.clip is not None:
            none = np.zeros(0, np.float32)
            scores = np.concatenate([none, *(seen.scores for seen in found if seen.scores is not None)])
            columns.append(pa.array(scores, pa.float32(), mask=np.isnan(scores)))
            schema.append(pa.field(CLIP, pa.float32()))
        return pa.table(columns, schema=pa.schema(schema))
