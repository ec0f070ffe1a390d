"""`sdp download`: the pipeline on Ray.

    spans of units ── read (tasks) ── a row for each unit ── fetch, check, write (actors) ── what was written

A unit stays whole from the reading of its rows to the writing of its part, so the account of each part is complete and
the listing of the output is all the state there is.
"""

import os
import pickle
import ssl
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, TaskPoolStrategy
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from sdp import cluster, telemetry
from sdp.config import DownloadConfig, identity
from sdp.console import Progress, say
from sdp.datasets import manifest, repeated, runs, tombstones
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import Head, Output, open_output, peek_output
from sdp.datasets.parts import PartInfo
from sdp.datasets.source import freeze_source, kind_of, order_retry, publish_plan
from sdp.datasets.units import PARTS, Rows, Work, parse_part_name
from sdp.download import blocklists, report, survey
from sdp.download.figures import DownloadFigures, Host, added
from sdp.download.plan import Rules
from sdp.download.politeness import Answer, Ask, HostLimits, SharedBudgets
from sdp.download.spans import Span, read_span, spans
from sdp.download.survey import Survey
from sdp.download.unit import UnitTask
from sdp.download.worker import KIND, DownloadWorker, WorkerSettings, worker_settings
from sdp.errors import DatasetError, SdpError, UserError
from sdp.lease import Lease
from sdp.storage import SourceFile, Storage, StorageOptions, list_source, open_source, open_storage
from sdp.telemetry import Telemetry

T = TypeVar("T")

_REPORT_S = 1.0
_PROGRESS_S = 0.5
_TASK_RETRIES = 30
"""Against a unit that kills its worker for ever. Of a node that has gone Ray hears after seconds; each try meanwhile
to reach its actors counts as one."""
_SMALL_SOURCE = 100_000
"""Rows that the driver looks over itself: starting a process would take longer."""
_IMAGES_A_SECOND = 100.0
"""What a CPU does, for a forecast."""


@dataclass(frozen=True, slots=True)
class DownloadSummary:
    """What a download has come to."""

    dataset: Dataset
    figures: DownloadFigures
    """Of this run alone."""
    seconds: float


def run(config: DownloadConfig, *, dry_run: bool = False, only_failed: bool = False) -> DownloadSummary | None:
    """Download what is not there yet, or with `only_failed` what has failed; None for a dry run."""
    began = time.monotonic()
    options = config.storage.options()
    _refuse_certificates(config.fetch.ca_file)
    rules = Rules(config.source, config.filters, blocklists.load(config.blocklists, options))
    files = list_source(config.source.uri, options)
    storage = open_storage(config.output.uri, options)
    head = Head(KIND, config.output.rows_per_file, False, identity(config))
    there = peek_output(storage, head)
    _refuse_folders(storage)
    before = open_dataset(storage, KIND) if only_failed else None  # only what is complete can be retried
    limit = config.limit if before is None else there.index.rows  # what has come since waits for another run
    planned = freeze_source(
        there, files, rules.columns(), uri=config.source.uri, limit=limit, options=options, publish=False
    )
    _refuse_columns(config, files[0], options)
    for line in report.lowered_limit(config.limit, there.index):
        say(line)
    if before is not None:
        _refuse_unfinished(there)
        for line in report.held_back(files, there.index, config.limit):
            say(line)
    if dry_run:
        for line in _intention(planned, before, len(files)):
            say(line)
        return None
    cluster.require_reachable()
    output = open_output(storage, head)
    with Lease.acquire(storage, "sdp download") as lease:
        output = publish_plan(output, planned)
        if only_failed:
            output = order_retry(output, open_dataset(storage, KIND))
        rules = _with_takedowns(rules, storage, options)
        pending = output.pending()
        rows, noted = _rows_to_do(output, pending), runs.begin("download")
        infos, figures = (
            _Download(config, output, rules, lease).work_off(pending, rows) if pending else ([], DownloadFigures())
        )
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            input={"uri": config.source.uri},
            find_repeated=partial(_find_repeated, storage, _placed(config)) if config.dedup.content else None,
        )
        work = {"fetches": {"under way": figures.seconds.total}}
        moved, workers = {"fetched": figures.bytes}, {"workers": figures.workers}
        runs.keep(storage, noted.ended(infos, moved=moved, work=work, workers=workers))
        if late := tombstones.settle(storage):
            written = "row has" if late == 1 else "rows have"
            say(f"download: {late:,} written {written} been taken down in the meantime: left out from now on")
    seconds = time.monotonic() - began
    for line in report.closing(dataset, figures, seconds):
        say(line)
    if (nothing := report.nothing_came(dataset)) is not None:
        raise DatasetError(nothing)
    return DownloadSummary(dataset, figures, seconds)


def _intention(planned: Output, before: Dataset | None, files: int) -> Iterator[str]:
    if before is not None:
        return report.retry_intention(before)
    pending = planned.pending()
    return report.intention(planned.index, pending, _rows_to_do(planned, pending), planned.storage.uri, files)


def _rows_to_do(output: Output, pending: Sequence[Work]) -> int:
    """For what is shown. What a retry was ordered for is in the manifest, if that is still there."""
    retried = any(work.attempt for work in pending) and output.storage.exists(manifest.MANIFEST)
    return report.rows_to_do(pending, open_dataset(output.storage, KIND).failures() if retried else {})


def _refuse_unfinished(output: Output) -> None:
    """A retry does nothing but retry: what a download before it has left undone, that download is to do."""
    missing = [work for work in output.pending() if not work.attempt]
    if missing:
        raise DatasetError(
            f"{output.storage.uri}: {len(missing):,} parts are still to be downloaded for the first time; run it "
            "without --only-failed first"
        )


def _refuse_folders(storage: Storage) -> None:
    """Folders where parts are to be: seen before their rows are fetched."""
    folder = Path(storage.uri, PARTS)
    if "://" in storage.uri or not folder.is_dir():  # an object store has no folders, a new output none yet
        return
    with os.scandir(folder) as entries:
        taken = next((entry.path for entry in entries if parse_part_name(PARTS + entry.name) and entry.is_dir()), None)
    if taken is not None:
        raise DatasetError(f"{taken}: expected a part, got a folder; move it away")


def _refuse_columns(config: DownloadConfig, file: SourceFile, options: StorageOptions) -> None:
    """Columns that can be no URLs and no captions, before each of their rows fails."""
    schema = pq.read_schema(open_source(file.uri, options))
    for key in ("url_column", "caption_column"):
        name = getattr(config.source, key)
        kind = kind_of(schema.field(name).type)
        if kind not in ("text", "bytes", "null"):  # what writes text as bytes is common
            raise DatasetError(f"source.{key}: expected a column of text, but {name} in {file.uri} holds {kind}")


def _refuse_certificates(file: str | None) -> None:
    if file is None:
        return
    try:
        ssl.create_default_context(cafile=file)
    except OSError as error:  # ssl's own are some
        cause = error.strerror or str(error)
        raise UserError(f"fetch.ca_file: no certificates can be read from {file} ({cause}); name a PEM file") from error


def _find_repeated(storage: Storage, placed: Mapping[str, Any], parts: Sequence[PartInfo], digest: str) -> int:
    """Find the rows whose content a lower one has, in this process where they are few."""
    if (known := repeated.known(storage, digest)) is not None:
        return known
    pieces = repeated.pieces(parts)
    partitions = repeated.partitions_for(sum(part.counts.written for part in parts))
    if len(pieces) <= 1:
        shares = [share for piece in pieces for share in repeated.look(storage, piece, partitions)]
        return repeated.keep(storage, digest, [repeated.repeated([keys], [rows]) for keys, rows in shares])
    say(f"download: looking for repeated content in {len(parts):,} parts")
    cluster.connect(include_dashboard=False)
    try:
        look: Any = _look_content.options(num_returns=partitions, **placed)
        repeats: Any = _repeated.options(**placed)
        looks = [look.remote(storage, piece, partitions) for piece in pieces]
        by_piece = [[one] for one in looks] if partitions == 1 else looks
        again = [repeats.remote(*share) for share in zip(*by_piece, strict=True)]
        return repeated.keep(storage, digest, (ray.get(one) for one in again))
    except RayError as error:
        raise _in_our_words(error) from error


def _with_takedowns(rules: Rules, storage: Storage, options: StorageOptions) -> Rules:
    """The rules with what has been taken down from this dataset meanwhile."""
    taken = tombstones.load(storage, options)
    hashes = blocklists.hash_keys(taken.hashes)
    lists = blocklists.Blocklists(urls=blocklists.url_keys(taken.urls), hashes=hashes)
    return replace(rules, taken_down=lists, taken_down_rows=taken.rows)


def _placed(config: DownloadConfig) -> dict[str, Any]:
    """Options that send work to the nodes it is asked to run on."""
    labels = dict(config.workers.node_labels)
    return {"label_selector": labels} if labels else {}


@dataclass(frozen=True)
class _Shape:
    """How the work is laid on the cluster."""

    cpus: int
    """Of one worker."""
    workers: int

    @staticmethod
    def of(config: DownloadConfig, pending: int) -> "_Shape":
        labels = config.workers.node_labels
        nodes = [int(node["Resources"].get("CPU", 0)) for node in cluster.nodes_with(labels)]
        cpus = max(1, min([config.workers.cpus, *(count for count in nodes if count)]))
        workers = config.concurrency or sum(count // cpus for count in nodes)
        return _Shape(cpus, max(1, min(workers, pending)))


class _Download:
    """One run over the pending works."""

    def __init__(self, config: DownloadConfig, output: Output, rules: Rules, lease: Lease) -> None:
        self._config, self._output, self._rules, self._lease = config, output, rules, lease
        self._options = config.storage.options()

    def work_off(self, pending: list[Work], total: int) -> tuple[list[PartInfo], DownloadFigures]:
        """Make all parts that are missing, of `total` rows; returns what their footers say, and the run's figures."""
        labels = self._config.workers.node_labels
        cluster.connect(include_dashboard=False)  # which only a Ray of our own would start
        cluster.require_labels("workers.node_labels", labels, can_grow="RAY_ADDRESS" in os.environ)
        shape = _Shape.of(self._config, len(pending))
        settings = worker_settings(self._config, self._output.storage, self._rules, shape.cpus)
        try:
            seen = self._survey(shape, settings.limits)
            hub = _start_hub(settings.limits)
            parts = self._pipeline(pending, shape, settings, hub, seen)
            infos: list[PartInfo] = []
            emit = telemetry.begin(self._config.output.uri)
            with _Shown(hub, total, emit):
                for row in parts.iter_rows():
                    self._lease.check()
                    made: PartInfo | SdpError = pickle.loads(row["info"])
                    if isinstance(made, SdpError):
                        raise made
                    infos.append(made)
            figures: DownloadFigures = ray.get(hub.total.remote())
            figures.workers = shape.workers
            report.emit(emit, figures, total)
        except RayError as error:
            raise _in_our_words(error) from error
        return infos, figures

    def _pipeline(
        self, pending: list[Work], shape: _Shape, settings: WorkerSettings, hub: Any, seen: Survey | None
    ) -> ray.data.Dataset:
        with cluster.data_settings(target_max_block_size=1):  # a block for each unit: they are dealt out one by one
            return self._units(pending, shape, settings, hub, seen)

    def _units(
        self, pending: list[Work], shape: _Shape, settings: WorkerSettings, hub: Any, seen: Survey | None
    ) -> ray.data.Dataset:
        duplicates = seen.stop if seen is not None and seen.duplicates else None
        reading = _Reading(self._rules.columns(), self._output.storage, self._options, duplicates)
        at_once = self._config.workers.units_at_once
        items = [{"span": pickle.dumps(span)} for span in spans(self._output.index, pending, shape.workers)]
        units = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            reading,
            batch_size=1,
            batch_format="pyarrow",
            num_cpus=0,  # it waits for storage, and the workers take all CPUs
            **self._placed,
            compute=TaskPoolStrategy(size=min(len(items), max(2, shape.workers // 4))),
        )
        with warnings.catch_warnings():
            # That further arguments go away in 2.64. By default Ray tries again without end what kills its process.
            warnings.simplefilter("ignore", RayDeprecationWarning)
            return units.map_batches(
                _Downloading,
                fn_constructor_args=(settings, hub, shape.workers),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=shape.cpus,
                compute=ActorPoolStrategy(
                    size=shape.workers,
                    max_tasks_in_flight_per_actor=at_once + 1,
                    max_concurrent_calls_per_actor=at_once,
                    enable_true_multi_threading=True,
                ),
                max_restarts=-1,
                max_task_retries=_TASK_RETRIES,
                **self._placed,
            )

    @property
    def _placed(self) -> dict[str, Any]:
        return _placed(self._config)

    def _survey(self, shape: _Shape, limits: HostLimits) -> Survey | None:
        """Count hosts and find repeated URLs, unless that has been done."""
        index, storage = self._output.index, self._output.storage
        if not (self._config.hosts.count or self._config.dedup.urls):
            return None
        seen = survey.load(storage, index.rows)
        if seen is None:
            seen = self._look()
            others_s = index.rows / (_IMAGES_A_SECOND * shape.cpus * shape.workers)
            for line in survey.forecast(seen.hosts, limits, others_s):
                say(line)
        return seen

    def _look(self) -> Survey:
        index, storage, rules = self._output.index, self._output.storage, self._rules
        partitions = survey.partitions_for(index.rows) if self._config.dedup.urls else 0
        if index.rows <= _SMALL_SOURCE:
            piece = survey.look(index, 0, index.rows, rules, self._options, partitions=partitions)
            again = [repeated.repeated([keys], [rows]) for keys, rows in zip(piece.keys, piece.rows, strict=True)]
            return survey.publish(storage, index.rows, piece.hosts, again)
        starts = range(0, index.rows, survey.PIECE_ROWS)
        shared, shared_rules = ray.put(index), ray.put(rules)
        pieces = [
            _look.options(num_returns=1 + partitions, **self._placed).remote(
                shared, at, min(at + survey.PIECE_ROWS, index.rows), shared_rules, self._options, partitions
            )
            for at in starts
        ]
        pieces = pieces if partitions else [[piece] for piece in pieces]
        repeats: Any = _repeated.options(**self._placed)
        found = [repeats.remote(*(piece[1 + number] for piece in pieces)) for number in range(partitions)]
        hosts: Counter[str] = Counter()
        with Progress("looking over the source") as progress:
            for number, piece in enumerate(pieces, 1):
                hosts.update(self._wait(piece[0]))
                hosts = survey.most_common(hosts)
                progress.update(f"{min(number * survey.PIECE_ROWS, index.rows):,} of {index.rows:,} rows")
        return survey.publish(storage, index.rows, hosts, map(self._wait, found))

    def _wait(self, reference: Any) -> Any:
        self._lease.check()
        return ray.get(reference)


class _Reading:
    """Reads spans: a row for each of their units."""

    def __init__(self, columns: list[str], output: Storage, options: StorageOptions, duplicates: int | None) -> None:
        """`duplicates` is the survey to ask for repeated URLs."""
        self._columns, self._output, self._options, self._duplicates = columns, output, options, duplicates

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        try:
            for data in batch["span"].to_pylist():
                for task in self._tasks(pickle.loads(data)):
                    yield pa.table({"task": pa.array([pickle.dumps(task)], pa.large_binary())})
        except SdpError as error:  # handed on as it is: raised, it would reach the driver as a text of Ray Data's
            yield pa.table({"task": pa.array([pickle.dumps(error)], pa.large_binary())})

    def _tasks(self, span: Span) -> Iterator[UnitTask]:
        for task in read_span(span, self._columns, self._output, self._options):
            if self._duplicates is not None:
                unit = task.work.unit
                found = survey.duplicates_in(self._output, self._duplicates, unit.start, unit.stop)
                task = replace(task, duplicates=found)
            yield task


class _Downloading:
    """An actor of the pool: one worker."""

    def __init__(self, settings: WorkerSettings, hub: Any, workers: int) -> None:
        self._name, self._hub = uuid4().hex, hub
        self._worker = DownloadWorker(
            settings,
            name=self._name,
            exchange=self._exchange if workers > 1 else None,
            exchange_every_s=max(0.02, workers / 2000),  # at most 2000 messages a second in all
        )
        threading.Thread(target=self._report, name="sdp-report", daemon=True).start()

    def __call__(self, batch: pa.Table) -> pa.Table:
        infos = [pickle.dumps(self._make(pickle.loads(data))) for data in batch["task"].to_pylist()]
        ray.get(self._hub.report.remote(self._name, self._worker.figures(), self._worker.take_hosts()))
        return pa.table({"info": pa.array(infos, pa.binary())})

    def _make(self, task: UnitTask | SdpError) -> PartInfo | SdpError:
        if isinstance(task, SdpError):
            return task
        try:
            return self._worker.make(task)
        except SdpError as error:  # as above
            return error

    def _exchange(self, ask: Ask) -> Answer:
        answer: Answer = ray.get(self._hub.exchange.remote(ask))
        return answer

    def _report(self) -> None:
        pause = threading.Event()
        while not pause.wait(_REPORT_S):
            self._hub.report.remote(self._name, self._worker.figures(), {})


class Hub:
    """What the workers share: the hosts' budgets, and the figures."""

    def __init__(self, limits: HostLimits) -> None:
        self._budgets = SharedBudgets(limits)
        self._figures: dict[str, DownloadFigures] = {}
        self._hosts = DownloadFigures()

    def exchange(self, ask: Ask) -> Answer:
        return self._budgets.exchange(ask, time.monotonic())

    def report(self, worker: str, figures: DownloadFigures, hosts: dict[str, Host]) -> None:
        self._figures[worker] = figures
        self._hosts.merge(DownloadFigures(hosts=hosts))

    def total(self) -> DownloadFigures:
        total = added(self._figures)
        total.merge(self._hosts)
        return total


def _start_hub(limits: HostLimits) -> Any:
    """The hub, beside the driver: it shall not go away with some worker's node (as it could if placed softly)."""
    here = cluster.this_node()
    hub = ray.remote(Hub).options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
    return hub.remote(limits)


class _Shown:
    """The progress line and the metrics, renewed by a thread while the pipeline runs."""

    def __init__(self, hub: Any, total: int, emit: Telemetry) -> None:
        self._hub, self._total, self._emit = hub, total, emit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sdp-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began, over = time.monotonic(), False
        with Progress("download") as progress:
            while not over:  # and once more in the end, so that the last line is what has come of it
                over = self._over.wait(_PROGRESS_S)
                try:
                    figures: DownloadFigures = ray.get(self._hub.total.remote(), timeout=2 if over else 10)
                except RayError:  # it comes back, or the pipeline says what is wrong
                    continue
                progress.update(report.progress_line(figures, self._total, time.monotonic() - began))
                report.emit(self._emit, figures, self._total)


@ray.remote(num_cpus=0.5)
def _look(*arguments: Any) -> Any:
    """A piece of the survey: its hosts, then for each partition its keys and rows."""
    *given, partitions = arguments
    piece = survey.look(*given, partitions=partitions)
    parts = list(zip(piece.keys, piece.rows, strict=True))
    return (piece.hosts, *parts) if partitions else piece.hosts


@ray.remote(num_cpus=0.5)
def _look_content(storage: Storage, paths: Sequence[str], partitions: int) -> Any:
    shares = repeated.look(storage, paths, partitions)
    return shares[0] if partitions == 1 else shares


@ray.remote(num_cpus=0.5)
def _repeated(*pieces: tuple[repeated.Keys, Rows]) -> Rows:
    return repeated.repeated([keys for keys, _ in pieces], [rows for _, rows in pieces])


def _in_our_words(error: RayError) -> SdpError:
    """The error of ours inside one of Ray's, or one line about Ray's own."""
    seen: BaseException | None = error
    while seen is not None:
        inner = getattr(seen, "cause", None) or seen.__cause__
        if isinstance(inner, SdpError) and not isinstance(inner, RayError):
            return inner
        seen = inner
    line = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return SdpError(f"the download was broken off ({line.strip()[:300]}); run it again: it goes on where it was")
