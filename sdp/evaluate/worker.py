"""An evaluator's work on a unit: compute the features of its pictures and publish them as a part."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.units import Work
from sdp.device import choose_device, out_of_memory
from sdp.encode.chunk import SourceRow
from sdp.encode.reading import Piece, read_piece
from sdp.encode.work import reason_to_skip
from sdp.errors import OutOfMemory
from sdp.evaluate.layout import CLIP, FEATURES, KIND
from sdp.evaluate.networks import Clip, LoadedNetwork, NetworkInput, load_network
from sdp.evaluate.prepare import EvaluateSpec, ReadTask
from sdp.imaging import MAX_PIXELS, Pixels, RowError, decode
from sdp.model import networks
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox

LAYOUT = Layout(row_group_rows=1024)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A picture in the forms that the networks expect."""

    row: int
    views: tuple[NetworkInput, ...]
    """One for each network."""
    caption: str


class EvaluateWorker:
    """An evaluator for units of several sets; it loads a network with the first unit that needs it."""

    def __init__(self, spec: Mapping[str, EvaluateSpec]) -> None:
        self._spec = spec
        self._loaded: dict[str, LoadedNetwork] = {}
        self._sandbox: Sandbox | None = None

    def make(self, task: ReadTask, on_rows: Callable[[int], None] = lambda _: None) -> tuple[str, PartInfo]:
        """Compute a unit's features and publish them; call `on_rows` with the number of pictures after each batch."""
        name, work, pieces = task
        spec = self._spec[name]
        if spec.foreign and self._sandbox is None:
            self._sandbox = Sandbox(child.pixels, MAX_PIXELS, spec.config.scaling.threads)
        return name, _UnitRun(spec, self._networks(spec), self._sandbox).run(work, pieces, on_rows)

    def _networks(self, spec: EvaluateSpec) -> dict[str, LoadedNetwork]:
        """Return the networks of a set, by digest."""
        device = choose_device()
        selected: dict[str, LoadedNetwork] = {}
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

    def __init__(self, spec: EvaluateSpec, networks: Mapping[str, LoadedNetwork], sandbox: Sandbox | None) -> None:
        self._spec, self._networks, self._sandbox = spec, networks, sandbox
        self._schema, self._batch = _schema(spec, networks), spec.config.scaling.batch_size
        self._reason_to_skip = reason_to_skip(spec)

    def run(self, work: Work, pieces: Sequence[Piece], on_rows: Callable[[int], None]) -> PartInfo:
        outcomes: list[Outcome] = []
        results = [self._schema.empty_table()]
        pictures = self._prepared(pieces, outcomes)
        while batch := list(islice(pictures, self._batch)):
            results += self._embed(batch, outcomes)
            on_rows(len(batch))
        table = pa.concat_tables(results).combine_chunks().sort_by("row")
        outcomes += [Outcome(row, WRITTEN) for row in table["row"].to_pylist()]
        return write_part(self._spec.output, KIND, work, table, account_table(outcomes), layout=LAYOUT)

    def _prepared(self, pieces: Sequence[Piece], outcomes: list[Outcome]) -> Iterator[_Prepared]:
        """Yield the pictures to embed; record the outcomes of the others."""
        spec = self._spec
        pictures = (row for piece in pieces for row in read_piece(piece, spec.columns, options=spec.storage))
        for prepared in ordered_map(self._prepare, pictures, spec.config.scaling.threads):
            if isinstance(prepared, Outcome):
                outcomes.append(prepared)
            else:
                yield prepared

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

    def _embed(self, batch: Sequence[_Prepared], outcomes: list[Outcome]) -> list[pa.Table]:
        """Compute features, in smaller batches if memory is short."""
        results: list[pa.Table] = []
        at = 0
        while at < len(batch):
            pictures = batch[at : at + self._batch]
            try:
                results.append(self._features(pictures, outcomes))
                at += len(pictures)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if self._batch == 1:
                    raise OutOfMemory(
                        "scaling.batch_size: no memory for a single picture; choose a larger GPU (scaling.accelerator)"
                    ) from error
                self._batch //= 2
        return results

    def _features(self, batch: Sequence[_Prepared], outcomes: list[Outcome]) -> pa.Table:
        """Return the rows of a batch; record those with NaN or infinite features as failed instead."""
        spec = self._spec
        rows = np.array([picture.row for picture in batch], np.int64)
        finite = np.ones(len(batch), np.bool_)
        columns: list[Any] = [rows]
        embedded = {
            digest: network.embed([picture.views[n] for picture in batch])
            for n, (digest, network) in enumerate(self._networks.items())
        }
        if spec.features is not None:
            features = np.ascontiguousarray(embedded[spec.features.digest], np.float32)
            finite = np.logical_and.reduce(np.isfinite(features), axis=1)
            kind = self._schema.field(FEATURES).type
            columns.append(pa.FixedSizeBinaryArray.from_buffers(kind, len(features), [None, pa.py_buffer(features)]))
        if spec.clip is not None:
            clip = self._networks[spec.clip.digest]
            assert isinstance(clip, Clip)
            captions = [picture.caption for picture in batch]
            captioned = np.array([bool(caption) for caption in captions])
            scores = np.full(len(batch), np.nan, np.float32)
            scores[captioned] = clip.scores(embedded[spec.clip.digest][captioned], list(filter(None, captions)))
            columns.append(pa.array(scores, pa.float32(), mask=np.isnan(scores)))
        outcomes += [Outcome(row, FAILED, "not_finite") for row in rows[~finite].tolist()]
        return pa.table(columns, schema=self._schema).filter(pa.array(finite))


def _schema(spec: EvaluateSpec, networks: Mapping[str, LoadedNetwork]) -> pa.Schema:
    fields = [pa.field("row", pa.int64(), nullable=False)]
    if spec.features is not None:
        width = networks[spec.features.digest].width
        metadata = {"shape": json.dumps([width]), "dtype": "float32"}
        fields.append(pa.field(FEATURES, pa.binary(4 * width), nullable=False, metadata=metadata))
    if spec.clip is not None:
        fields.append(pa.field(CLIP, pa.float32()))
    return pa.schema(fields)
