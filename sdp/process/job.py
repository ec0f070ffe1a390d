"""`sdp process`: units of addresses through `sdp.encode.pipeline`, each written as one part.

A unit is cut into pieces, which come back in any order. The rows of a unit whose pieces are all there are written by a
task that gets references: they do not pass through here. A piece that kills its worker is cut into smaller ones until
the row that kills is alone; that one is recorded as crashed, and the rest of its unit is not held up by it.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayTaskError

from sdp import cluster, telemetry
from sdp.config import ProcessConfig
from sdp.console import Progress, say, table
from sdp.datasets import manifest, runs
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.encode import work as worker
from sdp.encode.pipeline import Note, Pipeline, State, pack, plan_placement, unpack
from sdp.encode.reading import Piece, addresses
from sdp.encode.work import TRIES, Encoding, Orders
from sdp.errors import SdpError, Unavailable, one_line
from sdp.lease import Lease
from sdp.process.figures import Figures
from sdp.process.prepare import KIND, Prepared, Retry, begin, prepare, retry_of, with_tombstones
from sdp.process.report import emit, forecast, progress_line, spent, summary

_WRITES = 4
"""Parts written at once; also how many may wait before further units begin."""
_PATIENCE = 3
"""How often the writing of a part is tried again."""
_WAIT_S = 0.5
_WINDOW_S = 30.0
"""Over which the progress line's rates are taken."""
_EMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run."""

    dataset: Dataset | None
    """None after a dry run."""
    figures: Figures
    """Of this run."""


def run(config: ProcessConfig, *, dry_run: bool = False, only_failed: bool = False) -> Summary:
    """Encode what is not encoded yet; with `only_failed` try again what failed."""
    prepared = prepare(config)
    if dry_run:
        say(table(forecast(prepared, begin(prepared, only_failed=only_failed, write=False))))
        return Summary(None, Figures())
    cluster.require_gpu_setting("encode", config.encode)
    cluster.require_reachable()
    with Lease.acquire(prepared.orders.output, "sdp process") as lease:
        output = begin(prepared, only_failed=only_failed)
        figures, infos, noted = Figures(), list[PartInfo](), runs.begin("process")
        pending = output.pending()
        if pending:
            say(f"process: {len(pending)} of {len(output.index.works())} parts to make")
            with Progress("process") as progress:
                infos = _Run(prepared, output, pending, lease, figures, progress).work_off()
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            models={"encoder": f"{config.model.source} sha256:{prepared.digest}"},
            input=prepared.pictures.input,
        )
        runs.keep(output.storage, noted.ended(infos, **spent(figures)))
    say(table(summary(config, dataset, figures)))
    return Summary(dataset, figures)


@dataclass(slots=True)
class _Unit:
    """A unit under way."""

    missing: set[Piece]
    retry: Retry | None
    gathered: "dict[Piece, ObjectRef[pa.Table]]" = field(default_factory=dict)


class Units:
    """Which piece goes next, and which unit is complete. Knows nothing of Ray."""

    def __init__(self, planned: Iterator[tuple[Work, list[Piece], Retry | None]]) -> None:
        self._planned = planned
        self._exhausted = False
        self._queue: deque[Piece] = deque()
        self._complete: deque[Work] = deque()
        self.open: dict[Work, _Unit] = {}

    @property
    def finished(self) -> bool:
        """Whether everything is written."""
        return self._exhausted and not self.open

    def next_piece(self) -> Piece | None:
        """Return the next piece; None while units wait to be written, or at the end."""
        while True:
            if self._queue:
                return self._queue.popleft()
            if self._exhausted or sum(not unit.missing for unit in self.open.values()) > _WRITES:
                return None
            try:
                work, pieces, retry = next(self._planned)
            except StopIteration:
                self._exhausted = True
                return None
            self.open[work] = _Unit(set(pieces), retry)
            self._queue.extend(pieces)
            self._settle(work)  # a unit without pieces has a part all the same

    def gather(self, piece: Piece, rows: "ObjectRef[pa.Table]") -> None:
        """Take a piece's rows."""
        unit = self.open[piece.work]
        unit.missing.remove(piece)
        unit.gathered[piece] = rows
        self._settle(piece.work)

    def cut(self, piece: Piece) -> None:
        """Replace a piece by smaller ones."""
        unit = self.open[piece.work]
        parts = piece.narrow()
        unit.missing = (unit.missing - {piece}) | set(parts)
        self._queue.extendleft(reversed(parts))

    def next_complete(self) -> "tuple[Work, list[ObjectRef[pa.Table]]] | None":
        """Return a unit to write and its rows in the order of the source."""
        if not self._complete:
            return None
        work = self._complete.popleft()
        gathered = self.open[work].gathered
        return work, [gathered[piece] for piece in sorted(gathered, key=lambda piece: (piece.order, piece.skip))]

    def begin_again(self, work: Work) -> None:
        """Hand out all pieces of a unit again: rows were lost with a node before they were written."""
        unit = self.open[work]
        self._queue.extendleft(unit.gathered)
        unit.missing |= set(unit.gathered)
        unit.gathered.clear()
        self._settle(work)

    def _settle(self, work: Work) -> None:
        if not self.open[work].missing:
            self._complete.append(work)


class _Run:
    """One run, from its units to their parts."""

    def __init__(
        self,
        prepared: Prepared,
        output: Output,
        pending: list[Work],
        lease: Lease,
        figures: Figures,
        progress: Progress,
    ) -> None:
        config = prepared.config
        resources, can_grow = cluster.connect(), "RAY_ADDRESS" in os.environ
        cluster.require_accelerator("encode.accelerator", config.encode.accelerator, can_grow=can_grow)
        cluster.require_labels("transform.node_labels", config.transform.node_labels, can_grow=can_grow)
        self._prepared, self._output, self._lease = prepared, output, lease
        self._figures, self._progress = figures, progress
        self._orders: Orders = with_tombstones(prepared)
        self._placement = plan_placement(config.encode, config.transform, config.output.uri, resources)
        self._done_before = output.done()
        self._units = Units(self._planned(pending))
        self._under_way = 0
        self._writing: dict[ObjectRef[PartInfo], Work] = {}
        self._told = ray.put(self._orders)
        self._infos: list[PartInfo] = []
        self._batch_sizes = dict(self._orders.settings.batch_sizes)
        figures.rows_total = sum(len(work.unit) for work in pending)
        figures.images_total = prepared.images_of(figures.rows_total)
        self._recent: deque[tuple[float, int, int]] = deque()
        self._began = time.monotonic()
        self._telemetry, self._emitted = telemetry.begin(config.output.uri), 0.0

    def work_off(self) -> list[PartInfo]:
        """Make every part."""
        piece_bytes = self._prepared.piece_rows * sum(3 * side * side for side in self._orders.recipe.resolutions)
        with Pipeline(Encoding(self._orders), self._placement, piece_bytes) as pipeline:
            while not self._units.finished:
                self._lease.check()
                self._feed(pipeline)
                for piece, note, rows in pipeline.results(_WAIT_S if self._under_way else 0):
                    self._came(piece, note, rows)
                self._write()
                self._show(pipeline.state())
        return self._infos

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _planned(self, pending: list[Work]) -> Iterator[tuple[Work, list[Piece], Retry | None]]:
        prepared = self._prepared
        planner = prepared.pictures.planner(self._output, prepared.piece_rows, prepared.options)

        def plan(work: Work) -> tuple[Work, list[Piece], Retry | None]:
            return work, planner(work), retry_of(self._output, work, self._done_before)

        return ordered_map(plan, pending, workers=2)

    def _feed(self, pipeline: Pipeline) -> None:
        while not pipeline.full and (piece := self._units.next_piece()) is not None:
            retry = self._units.open[piece.work].retry
            self._under_way += 1
            pipeline.feed(piece, (piece, None if retry is None else retry.rows))

    def _came(self, piece: Piece, note: Note, rows: "ObjectRef[pa.Table]") -> None:
        self._under_way -= 1
        if note.died is not None:
            self._lost(piece, note.died)
        else:
            self._units.gather(piece, rows)
            figures, made = self._figures, note.transformed
            figures.images_encoded += made.items
            figures.transformed_on[note.transformed_on] += made.items
            figures.encoded_on[note.encoded_on] += made.items
            figures.busy_s += note.busy_s
            figures.idle_s += note.idle_s
            for what, count in note.batch_limits.items():  # memory had no room for a larger batch
                if count < self._batch_sizes[what]:
                    self._batch_sizes[what] = figures.fitting[what] = count

    def _lost(self, piece: Piece, detail: str) -> None:
        if piece.take > 1:
            self._units.cut(piece)
            return
        rows, retry = addresses(piece, self._prepared.options), self._units.open[piece.work].retry
        rows = rows if retry is None else rows[np.isin(rows, retry.rows)]
        outcomes = [Outcome(row, FAILED, "crashed", detail, attempts=TRIES) for row in rows.tolist()]
        self._units.gather(piece, ray.put(pack(None, worker.nothing(self._orders, outcomes))))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while len(self._writing) < _WRITES and (complete := self._units.next_complete()) is not None:
            self._lease.check()
            work, pieces = complete
            retry = self._units.open[work].retry
            write: Any = _write.options(max_retries=_PATIENCE, retry_exceptions=[Unavailable])
            self._writing[write.remote(self._told, work, dict(retry.reasons) if retry else {}, *pieces)] = work
        if self._writing:
            ended, _ = ray.wait([*self._writing], timeout=0 if self._under_way else _WAIT_S)
            for ref in ended:
                self._written(self._writing.pop(ref), ref)

    def _written(self, work: Work, ref: "ObjectRef[PartInfo]") -> None:
        try:
            info = ray.get(ref)
        except ObjectLostError:
            self._units.begin_again(work)
            return
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SdpError):
                raise cause from error
            raise SdpError(f"write: {work.name}: {type(cause).__name__}: {one_line(cause, 200)}") from error
        del self._units.open[work]
        self._infos.append(info)
        figures, counts = self._figures, info.counts
        figures.rows_done += len(work.unit)
        figures.written += counts.written
        figures.filtered += counts.filtered
        figures.failed += counts.failed
        figures.bytes_written += info.size
        figures.parts_written += 1

    # --- what a person sees ------------------------------------------------------------------------------------------

    def _show(self, state: State) -> None:
        figures, now = self._figures, time.monotonic()
        figures.elapsed_s = now - self._began
        made, figures.deaths = state.transformed_stats, sum(state.deaths.values())
        figures.images_transformed, figures.transform_s, figures.reading_s = made.items, made.seconds, made.reading_s
        figures.encoders, figures.transforms, figures.ready = state.encoders, state.transforms, state.ready
        figures.encoders_most = max(figures.encoders_most, figures.encoders)
        figures.transforms_most = max(figures.transforms_most, figures.transforms)
        self._recent.append((now, figures.images_transformed, figures.images_encoded))
        while self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        self._progress.update(progress_line(figures, self._recent))
        if now - self._emitted > _EMIT_S or self._units.finished:
            self._emitted = now
            emit(self._telemetry, figures)


@ray.remote(num_cpus=0.1)
def _write(orders: Orders, work: Work, retried: dict[str, int], *pieces: pa.Table) -> PartInfo:
    """Publish the part of a unit."""
    return worker.write_unit(orders, KIND, work, [unpack(piece)[1] for piece in pieces], retried)
