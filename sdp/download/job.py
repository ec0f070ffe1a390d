"""`sdp download`: the driver, from the checks before the work to the manifest.

A unit stays whole from reading its rows to writing its part, so the account of each part is complete and a listing of
the output shows the whole state.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow.parquet as pq

from sdp import telemetry
from sdp.config import identity
from sdp.config.download import DownloadConfig
from sdp.console import Progress, counted, say
from sdp.datasets import manifest, tombstones
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.parts import PartInfo
from sdp.datasets.source import freeze_source, order_retry, publish_plan
from sdp.datasets.units import Work
from sdp.download import blocklists, messages, repeats
from sdp.download.figures import DownloadFigures
from sdp.download.plan import Rules
from sdp.download.spans import spans
from sdp.download.stages import DownloadStages, Hub, hubs_for
from sdp.download.unit import KIND
from sdp.download.worker import WorkerSettings
from sdp.errors import DatasetError, SdpError
from sdp.hardware import usable_cores
from sdp.lease import Lease
from sdp.ray import cluster
from sdp.ray.waiting import Place, announce, wait_for
from sdp.runners.here import Here
from sdp.runners.placement import Placement
from sdp.runners.runner import Feed, RowsLost, Runner
from sdp.sources.joined import check_column
from sdp.storage import Storage, list_source, open_source, open_storage

UNITS_AT_ONCE = 2
"""Parts that a worker fills at once, each held in memory, so that slow images of one do not idle it."""
_HUB_RESTARTS = 30
_TRIES = 10
"""Deaths of downloaders at the same span after which a download gives up."""
_WAIT_S = 0.5


Written = tuple[list[PartInfo], DownloadFigures]
"""The footers of written parts, and the run's figures."""


@dataclass(frozen=True, slots=True)
class DownloadSummary:
    """The result of a download."""

    dataset: Dataset
    figures: DownloadFigures
    """Figures of this run alone."""


def run(config: DownloadConfig, *, dry_run: bool = False, only_failed: bool = False) -> DownloadSummary | None:
    """Download missing rows, or with `only_failed` retry failed ones; return None for a dry run."""
    began = time.monotonic()
    options = config.storage.options()
    rules = Rules(config.source, config.filters, blocklists.load(config.blocklists, options))
    files = list_source(config.source.uri, options)
    storage = open_storage(config.output.uri, options)
    decisive = identity(config)
    decisive["filters.columns"] = decisive["filters.columns"] or None  # as process records its filters
    head = Head(KIND, config.output.rows_per_file, False, decisive)
    existing = open_output(storage, head, writes=False)
    before = open_dataset(storage, KIND) if only_failed else None  # only a complete dataset can be retried
    limit = config.limit if before is None else existing.index.rows  # new rows of the source wait for another run
    columns, uri = rules.columns(), config.source.uri
    carried = config.source.columns
    planned = freeze_source(existing, files, columns, carried=carried, uri=uri, limit=limit)
    schema = pq.read_schema(open_source(files[0].uri, options))
    for key in ("url_column", "caption_column"):  # before each of their rows fails
        check_column(f"source.{key}", getattr(config.source, key), "text", schema, files[0].uri)
    if limit is not None and limit < existing.index.rows:
        say(f"limit: {limit:,} is less than the {existing.index.rows:,} rows that already have addresses, which stay")
    if before is not None:
        _refuse_unfinished(existing)
    if dry_run:
        for line in messages.intention(order_retry(planned, before) if before else planned, len(files)):
            say(line)
        return None
    cluster.require_reachable()
    with Lease.acquire(storage, "sdp download") as lease:
        output = publish_plan(open_output(storage, head), planned)
        if only_failed:
            output = order_retry(output, open_dataset(storage, KIND))
        rules = _with_takedowns(rules, storage)
        pending = output.pending()
        infos, figures = _write_pending(config, output, rules, pending, lease)
        find_repeated = partial(repeats.find_content, storage, config.workers.node_labels, lease.confirm)
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            input={"uri": config.source.uri},
            find_repeated=find_repeated if config.dedup.content else None,
            check=lease.confirm,
        )
        if late := tombstones.settle(storage):
            rows = counted(late, "written row has", "written rows have")
            say(f"download: {rows} been taken down in the meantime, and will be left out from now on")
    for line in messages.closing(dataset, figures, time.monotonic() - began):
        say(line)
    dataset.require_rows()
    return DownloadSummary(dataset, figures)


def _write_pending(config: DownloadConfig, output: Output, rules: Rules, pending: list[Work], lease: Lease) -> Written:
    """Write the pending parts, on Ray or in this process; return their footers and the run's figures."""
    if not pending:
        return [], DownloadFigures()
    cpus, cores = config.workers.cpus, usable_cores()
    alone = cluster.is_absent() and not config.workers.node_labels and (config.concurrency or cores // cpus) <= 1
    if not alone:
        cluster.connect()
        cluster.require_labels("workers.node_labels", config.workers.node_labels)
        place = Place("workers", {"CPU": 1.0}, least=1, most=1, labels=config.workers.node_labels)
        announce("download", [place])
        if not (config.concurrency or place.capacity):  # the nodes decide how many workers, so one must be there
            wait_for("download", [place], math.inf, check=lease.check)
    if config.dedup.urls:
        repeated_urls = repeats.find_urls(config, output, rules, lease.confirm)
        rules = replace(rules, repeated_urls=repeated_urls)
    if alone:
        stages = DownloadStages(WorkerSettings(config, output.storage, rules, min(cores, cpus)))
        here = Here(stages, "download", "downloader", at_once=UNITS_AT_ONCE)
        return write_parts(here, stages, output, pending, lease)
    from sdp.runners.on_ray import OnRay

    placement = plan_workers(config, len(pending))
    settings = WorkerSettings(config, output.storage, rules, int(placement.cpus))
    stages = DownloadStages(settings, placement.most, _hubs(config, placement))
    return write_parts(OnRay(stages, placement), stages, output, pending, lease)


def plan_workers(config: DownloadConfig, pending: int) -> Placement:
    """Return the placement of workers for this many pending parts on the nodes that are alive."""
    labels = config.workers.node_labels
    nodes = [int(node["Resources"].get("CPU", 0)) for node in cluster.nodes_with(labels)]
    cpus = max(1, min([config.workers.cpus, *(count for count in nodes if count)]))
    workers = max(1, min(config.concurrency or sum(count // cpus for count in nodes), pending))
    return Placement(
        job="download", section="workers", role="downloader", output=config.output.uri, least=workers, most=workers,
        labels=labels, cpus=float(cpus), at_once=UNITS_AT_ONCE, wait_s=math.inf, tries=_TRIES,
    )  # fmt: skip


def _hubs(config: DownloadConfig, placement: Placement) -> list[Any]:
    """Start the actors that share the budgets of hosts among several workers."""
    if placement.most == 1:
        return []
    start = partial(cluster.start_beside_driver, Hub, config.hosts, max_restarts=_HUB_RESTARTS, max_task_retries=-1)
    return [start() for _ in range(hubs_for(int(placement.cpus) * placement.most))]


def write_parts(runner: Runner, stages: DownloadStages, output: Output, pending: list[Work], lease: Lease) -> Written:
    """Write all pending parts; return their footers and the run's figures."""
    rows, infos, began = messages.rows_to_do(output, pending), list[PartInfo](), time.monotonic()
    left = deque(spans(output.index, pending, stages.workers))
    emit = telemetry.begin(output.storage.uri)

    def show() -> DownloadFigures:
        figures: DownloadFigures = sum(runner.state().figures.values(), DownloadFigures())
        progress.update(messages.progress_line(figures, rows, time.monotonic() - began))
        messages.emit(emit, figures, rows)
        return figures

    with Progress("download") as progress, runner:
        feed = Feed(runner, lambda: ((span := left.popleft()), span) if left else None)
        while left or feed.under_way:
            lease.check()
            for span, note, written in feed.results(_WAIT_S):
                if note.died is not None:
                    names = f"{span.works[0].name} to {span.works[-1].name}"
                    raise SdpError(f"{names}: the downloader died each time ({note.died}); see the workers' logs")
                try:
                    infos += runner.value(written)
                except RowsLost:  # with their node; the parts are there
                    left.append(span)
            show()
        figures = show()
    figures.workers = stages.workers
    figures.count_parts(info.counts for info in infos)
    messages.emit(emit, figures, rows)
    return infos, figures


def _refuse_unfinished(output: Output) -> None:
    """Refuse a retry while parts of the first attempt are missing."""
    if missing := [work for work in output.pending() if not work.attempt]:
        left = f"{counted(len(missing), 'part')} not downloaded yet"
        raise DatasetError(f"{output.storage.uri}: {left}; run the job without --only-failed first")


def _with_takedowns(rules: Rules, storage: Storage) -> Rules:
    """Return the rules with the takedowns of this dataset."""
    taken = tombstones.load(storage)
    lists = blocklists.of_takedowns(taken.values("url"), taken.values("sha256"))
    return replace(rules, taken_down=lists, taken_down_rows=taken.rows)
