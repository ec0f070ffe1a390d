"""`sdp process`: runs units of addresses through `sdp.encode.pipeline` and writes each as one part.

A unit is cut into pieces, which come back in any order. When all of a unit's pieces are back, a task gets references to
their rows and writes the part: rows never pass through the driver. A piece that kills its worker is cut until the row
at fault is alone; that row is recorded as crashed, and the rest of the unit is written.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sdp import telemetry
from sdp.config.process import ProcessConfig
from sdp.config.score import ScoreConfig
from sdp.console import Progress, counted, say, table
from sdp.datasets import manifest
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.encode.blocks import Note
from sdp.encode.desk import State
from sdp.encode.recipe import TEXT, TEXT_BATCH
from sdp.encode.work import TRIES, RowsSpec
from sdp.errors import SdpError, named
from sdp.lease import Lease
from sdp.process.local import WRITES, Local, RowsLost
from sdp.process.messages import ProcessFigures, emit, forecast, latents_lines, progress_line, summary
from sdp.process.prepare import Prepared, Retry, begin, prepare, retry_of, with_tombstones
from sdp.ray import cluster
from sdp.sources.pieces import Piece
from sdp.sources.reading import addresses

if TYPE_CHECKING:
    from sdp.process.on_ray import OnRay

_WAIT_S = 0.5
_EMIT_S = 1.0


AnyPrepared = Prepared[ProcessConfig | ScoreConfig, RowsSpec]
After = Callable[[Callable[[], None], Sequence[PartInfo], str], int]
"""A `repeated.Find` that gets the lease's check first."""


@dataclass(frozen=True, slots=True)
class ProcessSummary:
    """The result of a run."""

    dataset: Dataset | None
    """None after a dry run."""
    figures: ProcessFigures
    """This run's own."""
    duplicates: int | None = None
    """Rows that `sdp score` found to be near-duplicates of a lower row; None if nothing looked for them."""


def run(config: ProcessConfig, *, dry_run: bool = False, only_failed: bool = False) -> ProcessSummary:
    """Encode what is missing; with `only_failed`, retry the failed rows."""
    prepared = prepare(config)
    if dry_run:
        output = begin(prepared, only_failed=only_failed, write=False)
        say(table(forecast(prepared, output, lambda images: latents_lines(prepared, images))))
        return ProcessSummary(None, ProcessFigures())
    dataset, figures = write_dataset(prepared, "process", only_failed=only_failed)
    say(table(summary(config, dataset, figures)))
    dataset.require_rows()
    return ProcessSummary(dataset, figures)


def write_dataset(
    prepared: AnyPrepared, job: str, *, only_failed: bool = False, after: After | None = None
) -> tuple[Dataset, ProcessFigures]:
    """Write the parts that are missing, then the manifest; call `after` in between."""
    config = prepared.config
    cluster.require_gpu_setting("encode", config.encode)
    cluster.require_reachable()
    with Lease.acquire(prepared.spec.output, f"sdp {job}") as lease:
        output = begin(prepared, only_failed=only_failed)
        figures = ProcessFigures(job=job, gpus_each=float(bool(config.encode.gpu_each)))
        infos, pending = list[PartInfo](), output.pending()
        if pending:
            say(f"{job}: {len(pending)} of {counted(len(output.index.works()), 'part')} to write")
            with Progress(job) as progress:
                infos = _Run(prepared, output, pending, lease, figures, progress).run()
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            models=prepared.models,
            input=prepared.pictures.input,
            find_repeated=after and partial(after, lease.confirm),
            check=lease.confirm,
        )
    return dataset, figures


@dataclass(slots=True)
class _Unit:
    """A unit under way."""

    missing: set[Piece]
    retry: Retry | None
    gathered: dict[Piece, Any] = field(default_factory=dict)
    """Rows as the runner's `write` takes them, by piece."""
    writing: bool = False


class OpenUnits:
    """The order of pieces, and the units whose pieces are all back. Independent of Ray."""

    def __init__(self, planned: Iterator[tuple[Work, list[Piece], Retry | None]]) -> None:
        self._planned = planned
        self._exhausted = False
        self._queue: deque[Piece] = deque()
        self.open: dict[Work, _Unit] = {}

    @property
    def finished(self) -> bool:
        """True once everything is written."""
        return self._exhausted and not self.open

    def next_piece(self) -> Piece | None:
        """Return the next piece; None at the end, and while too many units wait to be written."""
        while not self._queue:
            if self._exhausted or sum(not unit.missing for unit in self.open.values()) > WRITES:
                return None
            planned = next(self._planned, None)
            if planned is None:
                self._exhausted = True
            else:
                work, pieces, retry = planned
                self.open[work] = _Unit(set(pieces), retry)
                self._queue.extend(pieces)
        return self._queue.popleft()

    def gather(self, piece: Piece, rows: Any) -> None:
        """Store a piece's rows."""
        unit = self.open[piece.work]
        unit.missing.remove(piece)
        unit.gathered[piece] = rows

    def cut(self, piece: Piece) -> None:
        """Replace a piece with smaller ones."""
        unit = self.open[piece.work]
        smaller = piece.narrow()
        unit.missing = (unit.missing - {piece}) | set(smaller)
        self._queue.extendleft(reversed(smaller))

    def next_complete(self) -> tuple[Work, list[Any]] | None:
        """Return a complete unit and its rows in the source's order; None if there is none."""
        for work, unit in self.open.items():
            if not unit.missing and not unit.writing:
                unit.writing = True
                pieces = sorted(unit.gathered, key=lambda piece: (piece.order, piece.skip))
                return work, [unit.gathered[piece] for piece in pieces]
        return None

    def restart(self, work: Work) -> None:
        """Queue all pieces of a unit again: rows were lost with a node before they were written."""
        unit = self.open[work]
        self._queue.extendleft(unit.gathered)
        unit.missing |= set(unit.gathered)
        unit.gathered.clear()
        unit.writing = False


class _Run:
    """One run over the pending units."""

    def __init__(
        self,
        prepared: AnyPrepared,
        output: Output,
        pending: list[Work],
        lease: Lease,
        figures: ProcessFigures,
        progress: Progress,
    ) -> None:
        self._prepared, self._output, self._lease = prepared, output, lease
        self._figures, self._progress = figures, progress
        self._stages = with_tombstones(prepared)
        self._runner = _runner(prepared, self._stages, isolate=lease.follows_a_crash)
        self._units = OpenUnits(self._plan_units(pending))
        self._under_way = 0
        self._writing: dict[Future[PartInfo], Work] = {}
        self._infos: list[PartInfo] = []
        self._batch_sizes = {TEXT: TEXT_BATCH, **prepared.spec.settings.batch_sizes}
        figures.rows_total = sum(len(work.unit) for work in pending)
        figures.images_total = prepared.images_of(figures.rows_total)
        self._began = time.monotonic()
        self._telemetry, self._emitted = telemetry.begin(prepared.config.output.uri), 0.0

    def run(self) -> list[PartInfo]:
        """Write every pending part."""
        with self._runner as runner:
            while not self._units.finished:
                self._lease.check()
                self._feed(runner)
                for piece, note, rows in runner.results(_WAIT_S if self._under_way else 0):
                    self._receive(piece, note, rows)
                self._write()
                self._show(runner.state())
        return self._infos

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _plan_units(self, pending: list[Work]) -> Iterator[tuple[Work, list[Piece], Retry | None]]:
        prepared = self._prepared
        planner = prepared.pictures.planner(self._output, prepared.piece_rows, prepared.spec.storage)

        def plan(work: Work) -> tuple[Work, list[Piece], Retry | None]:
            return work, planner(work), retry_of(self._output, work)

        return ordered_map(plan, pending, workers=2)

    def _feed(self, runner: "Local | OnRay") -> None:
        while not runner.full and (piece := self._units.next_piece()) is not None:
            retry = self._units.open[piece.work].retry
            self._under_way += 1
            runner.feed(piece, (piece, None if retry is None else retry.rows))

    def _receive(self, piece: Piece, note: Note, rows: Any) -> None:
        self._under_way -= 1
        if note.died is not None:
            self._isolate(piece, note.died)
        else:
            self._units.gather(piece, rows)
            figures, items = self._figures, note.transformed.items
            figures.images_encoded += items
            figures.transformed_on[note.transformed_on] += items
            figures.encoded_on[note.encoded_on] += items
            figures.busy_s += note.busy_s
            figures.idle_s += note.idle_s
            for side, count in note.batch_limits.items():
                if count < self._batch_sizes[side]:  # memory was too short for a larger batch
                    self._batch_sizes[side] = figures.fitting[side] = count

    def _isolate(self, piece: Piece, detail: str) -> None:
        """Cut a piece that kills its workers; record a single row as crashed."""
        if piece.take > 1:
            self._units.cut(piece)
            return
        rows, retry = addresses(piece, self._prepared.spec.storage), self._units.open[piece.work].retry
        rows = rows if retry is None else rows[np.isin(rows, retry.rows)]
        outcomes = [Outcome(row, FAILED, "crashed", detail, attempts=TRIES) for row in rows.tolist()]
        self._units.gather(piece, self._runner.keep((self._stages.schema.empty_table(), outcomes)))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while len(self._writing) < WRITES and (complete := self._units.next_complete()) is not None:
            self._lease.check()
            work, pieces = complete
            retry = self._units.open[work].retry
            self._writing[self._runner.write(work, retry.reasons if retry else {}, pieces)] = work
        done, _ = wait([*self._writing], 0 if self._under_way else _WAIT_S, FIRST_COMPLETED)
        for part in done:
            self._finish(self._writing.pop(part), part)

    def _finish(self, work: Work, part: Future[PartInfo]) -> None:
        try:
            info = self._runner.written(part)
        except RowsLost:
            self._units.restart(work)
            return
        except SdpError:
            raise
        except Exception as error:
            raise SdpError(f"write: {work.name}: {named(error)}") from error
        del self._units.open[work]
        self._infos.append(info)
        figures = self._figures
        figures.rows_done += len(work.unit)
        figures.counts += info.counts
        figures.bytes_written += info.size
        figures.parts_written += 1

    # --- progress ----------------------------------------------------------------------------------------------------

    def _show(self, state: State) -> None:
        figures, now = self._figures, time.monotonic()
        figures.elapsed_s = now - self._began
        figures.pipeline = state
        figures.encoders_most = max(figures.encoders_most, state.encoders)
        figures.transforms_most = max(figures.transforms_most, state.transforms)
        self._progress.update(progress_line(figures))
        if now - self._emitted > _EMIT_S or self._units.finished:
            self._emitted = now
            emit(self._telemetry, figures)


def _runner(prepared: AnyPrepared, stages: RowsSpec, *, isolate: bool) -> "Local | OnRay":
    """Return where the stages run; with `isolate` that is Ray, which outlives a row that kills its process."""
    config = prepared.config
    if cluster.is_needless(config.encode) and not config.transform.node_labels:
        if not isolate:
            return Local(stages)
        say("the run before ended without a word, so Ray runs this one, and isolates a row that kills its worker")
    from sdp.process.on_ray import OnRay

    return OnRay(config, stages, prepared.piece_rows * sum(3 * side * side for side in stages.recipe.resolutions))
