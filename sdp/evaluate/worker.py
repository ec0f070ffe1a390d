"""An evaluator's work on a unit: compute the features of its pictures and publish them as a part."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from sdp.config import EvaluateConfig
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.units import Work
from sdp.device import choose_device
from sdp.encode.chunk import SourceRow
from sdp.encode.reading import Piece, read_piece
from sdp.encode.work import SourceSpec, reason_to_skip
from sdp.errors import SdpError
from sdp.evaluate.layout import CLIP, FEATURES, KIND
from sdp.evaluate.networks import Clip, Network, Prepared, Rows, load_network
from sdp.imaging import MAX_PIXELS, Pixels, RowError, decode
from sdp.model import networks
from sdp.model.networks import FeatureNetwork
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox

LAYOUT = Layout(row_group_rows=1024)
Task = tuple[str, Work, Sequence[Piece]]
"""The name of a set, a unit of it, and the pieces to read."""


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec(SourceSpec):
    """The settings of the evaluators for one set of pictures."""

    config: EvaluateConfig
    features: FeatureNetwork | None
    clip: FeatureNetwork | None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A picture in the forms that the networks expect."""

    row: int
    views: tuple[Prepared, ...]
    """One for each network."""
    caption: str


@dataclass(frozen=True, slots=True)
class _Batch:
    """The networks' results for a batch of pictures."""

    rows: Sequence[int]
    features: Rows | None
    scores: NDArray[np.float32] | None
    """CLIP scores; NaN without a caption."""


class EvaluateWorker:
    """An evaluator for units of several sets; it loads a network with the first unit that needs it."""

    def __init__(self, spec: Mapping[str, EvaluateSpec]) -> None:
        self._spec = spec
        self._loaded: dict[str, Network] = {}
        self._sandbox: Sandbox | None = None

    def make(self, task: Task, on_rows: Callable[[int], None] = lambda _: None) -> tuple[str, PartInfo]:
        """Compute a unit's features and publish them; call `on_rows` with the number of pictures after each batch."""
        name, work, pieces = task
        spec = self._spec[name]
        if spec.foreign and self._sandbox is None:
            self._sandbox = Sandbox(child.pixels, MAX_PIXELS, spec.config.scaling.threads)
        return name, _UnitRun(spec, self._networks(spec), self._sandbox).run(work, pieces, on_rows)

    def _networks(self, spec: EvaluateSpec) -> dict[str, Network]:
        """Return the networks of a set, by digest."""
        device = choose_device()
        selected: dict[str, Network] = {}
        for key, network in (("features.model", spec.features), ("clip.model", spec.clip)):
            if network is None:
                continue
            if network.digest not in self._loaded:
                local = networks.find(network.source, key, storage=spec.storage)  # on this machine
                self._loaded[network.digest] = load_network(local, spec.config.features.resize, device)
            selected[network.digest] = self._loaded[network.digest]
        return selected


class _UnitRun:
    """The work on one unit."""

    def __init__(self, spec: EvaluateSpec, networks: Mapping[str, Network], sandbox: Sandbox | None) -> None:
        self._spec, self._networks, self._sandbox = spec, networks, sandbox
        self._batch = spec.config.scaling.batch_size
        self._reason_to_skip = reason_to_skip(spec)

    def run(self, work: Work, pieces: Sequence[Piece], on_rows: Callable[[int], None]) -> PartInfo:
        outcomes: list[Outcome] = []
        results: list[_Batch] = []
        batch: list[_Prepared] = []
        spec = self._spec
        pictures = (row for piece in pieces for row in read_piece(piece, spec.columns, options=spec.storage))
        for prepared in ordered_map(self._prepare, pictures, spec.config.scaling.threads):
            if isinstance(prepared, Outcome):
                outcomes.append(prepared)
                continue
            batch.append(prepared)
            if len(batch) >= self._batch:
                results += self._embed(batch, outcomes)
                on_rows(len(batch))
                batch = []
        results += self._embed(batch, outcomes)
        table = self._table(results).sort_by("row")
        outcomes += [Outcome(row, WRITTEN) for row in table["row"].to_pylist()]
        return write_part(spec.output, KIND, work, table, account_table(outcomes), layout=LAYOUT)

    def _prepare(self, picture: SourceRow) -> _Prepared | Outcome:
        row = picture.row
        if (reason := self._reason_to_skip(row)) is not None:
            return Outcome(row, FILTERED, reason)
        try:
            if picture.image is None:
                raise RowError("empty", "the row has no image")
            pixels = self._decode(picture.image)
            views = tuple(network.prepare(pixels) for network in self._networks.values())
        except RowError as error:
            return Outcome(row, FAILED, error.reason, error.detail)
        return _Prepared(row, views, (picture.caption or "").strip())

    def _decode(self, data: bytes | memoryview) -> Pixels:
        if not self._spec.foreign:
            return decode(data).pixels
        assert self._sandbox is not None
        return child.unpacked(*self._sandbox(data))

    def _embed(self, batch: Sequence[_Prepared], outcomes: list[Outcome]) -> list[_Batch]:
        """Compute features, in smaller batches if memory is short."""
        results: list[_Batch] = []
        at = 0
        while at < len(batch):
            pictures = batch[at : at + self._batch]
            try:
                results.append(self._keep_finite(self._features(pictures), outcomes))
                at += len(pictures)
            except torch.OutOfMemoryError as error:
                if self._batch == 1:
                    raise SdpError(
                        "scaling.batch_size: no memory for a single picture; choose a larger GPU (scaling.accelerator)"
                    ) from error
                self._batch //= 2
        return results

    def _features(self, batch: Sequence[_Prepared]) -> _Batch:
        spec = self._spec
        rows = {
            digest: network.embed([picture.views[n] for picture in batch])
            for n, (digest, network) in enumerate(self._networks.items())
        }
        scores = None
        if spec.clip is not None:
            clip = self._networks[spec.clip.digest]
            assert isinstance(clip, Clip)
            captioned = np.array([bool(picture.caption) for picture in batch])
            scores = np.full(len(batch), np.nan, np.float32)
            scores[captioned] = clip.scores(
                rows[spec.clip.digest][captioned], [picture.caption for picture in batch if picture.caption]
            )
        return _Batch([picture.row for picture in batch], rows[spec.features.digest] if spec.features else None, scores)

    def _keep_finite(self, batch: _Batch, outcomes: list[Outcome]) -> _Batch:
        """Return the rows without NaN or infinity; record the others as failed."""
        if batch.features is None:
            return batch
        good = np.logical_and.reduce(np.isfinite(batch.features), axis=1)
        outcomes += [Outcome(row, FAILED, "not_finite") for row, ok in zip(batch.rows, good, strict=True) if not ok]
        rows = [row for row, ok in zip(batch.rows, good, strict=True) if ok]
        return _Batch(rows, batch.features[good], None if batch.scores is None else batch.scores[good])

    def _table(self, results: Sequence[_Batch]) -> pa.Table:
        spec = self._spec
        rows = pa.array([row for batch in results for row in batch.rows], pa.int64())
        columns, schema = [rows], [pa.field("row", pa.int64(), nullable=False)]
        if spec.features is not None:
            width = self._networks[spec.features.digest].width
            empty = np.zeros((0, width), np.float32)
            features = np.concatenate([empty, *(batch.features for batch in results if batch.features is not None)])
            kind = pa.binary(4 * width)
            data = pa.py_buffer(np.ascontiguousarray(features, np.float32))
            columns.append(pa.FixedSizeBinaryArray.from_buffers(kind, len(features), [None, data]))
            metadata = {"shape": json.dumps([width]), "dtype": "float32"}
            schema.append(pa.field(FEATURES, kind, nullable=False, metadata=metadata))
        if spec.clip is not None:
            none = np.zeros(0, np.float32)
            scores = np.concatenate([none, *(batch.scores for batch in results if batch.scores is not None)])
            columns.append(pa.array(scores, pa.float32(), mask=np.isnan(scores)))
            schema.append(pa.field(CLIP, pa.float32()))
        return pa.table(columns, schema=pa.schema(schema))
