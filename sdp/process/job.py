"""`sdp process`: writes the units of a source through the stages of a runner, each as one part."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sdp import telemetry
from sdp.config.process import ProcessConfig
from sdp.console import Progress, counted, say, table
from sdp.datasets import manifest
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo, write_part
from sdp.datasets.units import Work
from sdp.encode.recipe import TEXT, TEXT_BATCH
from sdp.encode.table import assemble
from sdp.encode.work import PieceRows, RowsSpec, WorkItem
from sdp.errors import UserError
from sdp.lease import Lease
from sdp.process.messages import ProcessFigures, emit, forecast, latents_lines, progress_line, summary, taken_down_lines
from sdp.process.prepare import AnyConfig, Prepared, Retry, begin, prepare, retry_of, with_tombstones
from sdp.ray import cluster
from sdp.runners.blocks import Note
from sdp.runners.desk import State
from sdp.runners.here import Here
from sdp.runners.placement import plan_placement
from sdp.runners.runner import Runner
from sdp.runners.units import crashed, run_units
from sdp.runners.where import works_here
from sdp.sources.pieces import Piece
from sdp.sources.reading import addresses

_EMIT_S = 1.0


AnyPrepared = Prepared[AnyConfig, RowsSpec]
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


def run(
    config: ProcessConfig, *, dry_run: bool = False, only_failed: bool = False, changed: bool = False
) -> ProcessSummary:
    """Encode what is missing; with `only_failed`, retry the failed rows; with `changed`, also what was edited."""
    if only_failed and changed:
        raise UserError("process: --changed: expected no --only-failed beside it; run one after the other")
    prepared = prepare(config)
    if dry_run:
        output = begin(prepared, only_failed=only_failed, changed=changed, write=False)
        say(table(forecast(prepared, output, lambda images: latents_lines(prepared, images))))
        return ProcessSummary(None, ProcessFigures())
    dataset, figures = write_dataset(prepared, "process", only_failed=only_failed, changed=changed)
    say(table(summary(config, dataset, figures, taken_down_lines(dataset))))
    dataset.require_rows()
    return ProcessSummary(dataset, figures)


def write_dataset(
    prepared: AnyPrepared, job: str, *, only_failed: bool = False, changed: bool = False, after: After | None = None
) -> tuple[Dataset, ProcessFigures]:
    """Write the parts that are missing, then the manifest; call `after` in between."""
    config = prepared.config
    cluster.require_gpu_setting("encode", config.encode)
    cluster.require_reachable()
    with Lease.acquire(prepared.spec.output, f"sdp {job}") as lease:
        output = begin(prepared, only_failed=only_failed, changed=changed)
        infos, pending = list[PartInfo](), output.pending()
        rows = sum(len(work.unit) for work in pending)
        figures = ProcessFigures(job, rows, prepared.images_of(rows), gpus_each=float(bool(config.encode.gpu_each)))
        if pending:
            say(f"{job}: {len(pending)} of {counted(len(output.index.works()), 'part')} to write")
            with Progress(job) as progress:
                stages = with_tombstones(prepared)
                runner = _runner(prepared, stages, isolate=lease.follows_a_crash)  # metrics go by Ray, if it is there
                run = _Run(prepared, stages, output, figures, progress)
                infos = run_units(runner, run.plan_units(pending), run, lease.check)
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


class _Run:
    """The `runners.units.Job` of one run: its pieces, its parts and its figures."""

    def __init__(
        self, prepared: AnyPrepared, stages: RowsSpec, output: Output, figures: ProcessFigures, progress: Progress
    ) -> None:
        self._prepared, self._stages, self._output = prepared, stages, output
        self._figures, self._progress = figures, progress
        self.write = write_unit
        self._retries: dict[Work, Retry] = {}
        self._batch_sizes = {TEXT: TEXT_BATCH, **prepared.spec.settings.batch_sizes}
        self._began = time.monotonic()
        self._telemetry, self._emitted = telemetry.begin(prepared.config.output.uri), 0.0

    def plan_units(self, pending: Sequence[Work]) -> Iterator[tuple[Work, Sequence[Piece]]]:
        """Yield each unit with its pieces."""
        prepared = self._prepared
        planner = prepared.pictures.planner(self._output, prepared.piece_rows, prepared.spec.storage)

        def plan(work: Work) -> tuple[Work, list[Piece], Retry | None]:
            return work, planner(work), retry_of(self._output, work)

        for work, pieces, retry in ordered_map(plan, pending, workers=2):
            if retry is not None:
                self._retries[work] = retry
            yield work, pieces

    def item(self, piece: Piece) -> WorkItem:
        retry = self._retries.get(piece.work)
        return piece, (None if retry is None else retry.rows)

    def crashed(self, piece: Piece, detail: str) -> PieceRows:
        rows, retry = addresses(piece, self._prepared.spec.storage), self._retries.get(piece.work)
        rows = rows if retry is None else rows[np.isin(rows, retry.rows)]
        return self._stages.schema.empty_table(), crashed(rows.tolist(), detail)

    def retried(self, work: Work) -> Mapping[str, int]:
        return self._retries[work].reasons if work in self._retries else {}

    def receive(self, _: Piece, note: Note) -> None:
        figures, items = self._figures, note.prepared.items
        figures.images_encoded += items
        figures.transformed_on[note.prepared_on] += items
        figures.encoded_on[note.worked_on] += items
        figures.busy_s += note.busy_s
        figures.idle_s += note.idle_s
        for side, count in note.batch_limits.items():
            if count < self._batch_sizes[side]:  # memory was too short for a larger batch
                self._batch_sizes[side] = figures.fitting[side] = count

    def finish(self, work: Work, info: PartInfo) -> None:
        self._retries.pop(work, None)
        figures = self._figures
        figures.rows_done += len(work.unit)
        figures.counts += info.counts
        figures.bytes_written += info.size
        figures.parts_written += 1

    def show(self, state: State) -> None:
        figures, now = self._figures, time.monotonic()
        figures.elapsed_s = now - self._began
        figures.pipeline = state
        figures.encoders_most = max(figures.encoders_most, state.workers)
        figures.transforms_most = max(figures.transforms_most, state.preparing)
        self._progress.update(progress_line(figures))
        if now - self._emitted > _EMIT_S or figures.rows_done == figures.rows_total:
            self._emitted = now
            emit(self._telemetry, figures)


def write_unit(stages: RowsSpec, pieces: Sequence[PieceRows], work: Work, retried: Mapping[str, int]) -> PartInfo:
    """Publish the part of a unit."""
    rows, account = assemble(pieces, stages.schema)
    return write_part(stages.output, stages.kind, work, rows, account, layout=stages.layout, retried=retried)


def _runner(prepared: AnyPrepared, stages: RowsSpec, *, isolate: bool) -> Runner:
    """Return where the stages run; with `isolate` that is Ray, which outlives a row that kills its process."""
    config = prepared.config
    if not config.transform.node_labels and works_here(config.encode, isolate=isolate):
        return Here(stages)
    resources = cluster.connect()
    cluster.require_accelerator("encode.accelerator", config.encode.gpu_type)
    cluster.require_labels("transform.node_labels", config.transform.node_labels)
    placement = plan_placement(config.encode, config.transform, config.output.uri, resources)
    from sdp.ray.waiting import announce
    from sdp.runners.on_ray import OnRay

    announce("encode", placement.places(prepares=True))
    return OnRay(stages, placement, prepared.piece_rows * sum(3 * side * side for side in stages.recipe.resolutions))
