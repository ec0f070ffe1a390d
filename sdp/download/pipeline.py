"""The download on Ray Data, from pending works to written parts.

spans of units ── read (tasks) ── a row for each unit ── fetch, check, write (actors) ── footers
"""

import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import ray
from ray.data import ActorPoolStrategy, TaskPoolStrategy
from ray.exceptions import RayError

from sdp import telemetry
from sdp.config.download import DownloadConfig, HostsConfig
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.download import messages
from sdp.download.budgets import Answer, Ask, SharedBudgets
from sdp.download.figures import DownloadFigures
from sdp.download.local import UNITS_AT_ONCE, shown
from sdp.download.repeats import placement
from sdp.download.spans import read_span, spans
from sdp.download.turnstile import SharedGate
from sdp.download.unit import UnitTask
from sdp.download.worker import DownloadWorker, WorkerSettings
from sdp.errors import SdpError
from sdp.lease import Lease
from sdp.ray import cluster
from sdp.ray.waiting import Place, Stall
from sdp.storage import Storage, StorageOptions

_REPORT_S = 1.0
_HUB_RESTARTS = 30
_CPUS_A_HUB, _MOST_HUBS = 400, 8
"""CPUs of workers for which there is another hub: about half of what fills one's core."""


@dataclass(frozen=True)
class PoolShape:
    """The number of workers and their size."""

    cpus: int
    """CPUs of one worker."""
    workers: int

    @property
    def hubs(self) -> int:
        """The number of actors that share the budgets of the hosts."""
        return min(_MOST_HUBS, -(-self.cpus * self.workers // _CPUS_A_HUB))

    @staticmethod
    def of(config: DownloadConfig, pending: int) -> "PoolShape":
        """Return the shape for this many pending parts on the nodes that are alive."""
        nodes = [int(node["Resources"].get("CPU", 0)) for node in cluster.nodes_with(config.workers.node_labels)]
        cpus = max(1, min([config.workers.cpus, *(count for count in nodes if count)]))
        workers = config.concurrency or sum(count // cpus for count in nodes)
        return PoolShape(cpus, max(1, min(workers, pending)))


def write_parts(
    settings: WorkerSettings,
    output: Output,
    pending: list[Work],
    rows: int,
    shape: PoolShape,
    lease: Lease,
) -> tuple[list[PartInfo], DownloadFigures]:
    """Write all pending parts, of `rows` rows in total; return their footers and the run's figures."""
    hubs = [
        cluster.start_beside_driver(Hub, settings.config.hosts, max_restarts=_HUB_RESTARTS, max_task_retries=-1)
        for _ in range(shape.hubs)
    ]
    with cluster.data_settings(target_max_block_size=1):  # a block for each unit, so that each goes to a free worker
        parts = _dataset(settings, output, pending, shape, hubs)
    infos: list[PartInfo] = []
    emit = telemetry.begin(settings.config.output.uri)
    stall = Stall("download", [Place("workers", {"CPU": shape.cpus}, 1, 1, dict(settings.config.workers.node_labels))])
    with shown(partial(_total, hubs[0], stall), rows, emit):
        for row in parts.iter_rows():
            lease.check()
            result: PartInfo | SdpError = pickle.loads(row["info"])
            if isinstance(result, SdpError):
                raise result
            infos.append(result)
    figures: DownloadFigures = ray.get(hubs[0].total.remote())
    figures.workers = shape.workers
    figures.count_parts(info.counts for info in infos)
    messages.emit(emit, figures, rows)
    return infos, figures


def _dataset(
    settings: WorkerSettings, output: Output, pending: list[Work], shape: PoolShape, hubs: list[Any]
) -> ray.data.Dataset:
    config, ray_options = settings.config, placement(settings.config)
    items = [{"span": pickle.dumps(span)} for span in spans(output.index, pending, shape.workers)]
    units = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(
        partial(read_units, settings.rules.columns(), output.storage, config.storage.options()),
        num_cpus=0,  # it waits for storage, and the workers use all CPUs
        **ray_options,
        compute=TaskPoolStrategy(size=min(len(items), shape.workers, max(2, shape.workers // 4))),
    )

    return units.map(
        Download,  # type: ignore[arg-type]  # Ray's signature leaves out classes
        fn_constructor_args=(settings, hubs, shape.workers),
        num_cpus=shape.cpus,
        compute=ActorPoolStrategy(
            size=shape.workers,
            max_tasks_in_flight_per_actor=UNITS_AT_ONCE + 1,
            max_concurrent_calls_per_actor=UNITS_AT_ONCE,
            enable_true_multi_threading=True,
        ),
        **ray_options,
    )


def read_units(
    columns: list[str], output: Storage, options: StorageOptions, row: dict[str, bytes]
) -> Iterator[dict[str, bytes]]:
    """Read a span, and yield a row for each unit."""
    try:
        for task in read_span(pickle.loads(row["span"]), columns, output, options):
            yield {"task": pickle.dumps(task)}
    except SdpError as error:  # passed on as a value: Ray Data would turn it into text
        yield {"task": pickle.dumps(error)}


class Download:
    """An actor of the pool, with one download worker."""

    def __init__(self, settings: WorkerSettings, hubs: list[Any], workers: int) -> None:
        """The first hub also gets the figures."""
        self._name, self._hub = uuid4().hex, hubs[0]
        actor = cluster.count_worker(self._hub, "download worker")
        ahead = -(-2 * settings.config.fetch.connections // len(hubs))
        pause_s = max(0.02, workers / 2000)  # at most 2000 messages a second from all workers
        gates = [SharedGate(self._name, ahead, partial(_exchange, hub), pause_s) for hub in hubs]
        self._worker = DownloadWorker(settings, gates if workers > 1 else ())
        self._hub.end.remote(actor)
        threading.Thread(target=self._report, name="sdp-report", daemon=True).start()

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        task: UnitTask | SdpError = pickle.loads(row["task"])
        try:
            result = task if isinstance(task, SdpError) else self._make(task)
        except SdpError as error:  # passed on as a value, as above
            result = error
        ray.get(self._hub.report.remote(self._name, self._worker.figures()))
        return {"info": pickle.dumps(result)}

    def _make(self, task: UnitTask) -> PartInfo:
        cluster.count_start(self._hub, task.work.name)
        info = self._worker.make(task)
        self._hub.end.remote(task.work.name)
        return info

    def _report(self) -> None:
        pause = threading.Event()
        while not pause.wait(_REPORT_S):
            self._hub.report.remote(self._name, self._worker.figures())


def _exchange(hub: Any, ask: Ask) -> "Future[Answer]":
    answer: Future[Answer] = hub.exchange.remote(ask).future()
    return answer


class Hub(cluster.Starts):
    """The workers' shared state: the budgets of hosts, the figures, and how often each part was begun.

    Of several hubs each has the budgets of its share of the hosts, and the first has the rest.
    """

    def __init__(self, limits: HostsConfig) -> None:
        super().__init__(cluster.STARTS)
        self._budgets = SharedBudgets(limits)
        self._figures: dict[str, DownloadFigures] = {}

    def exchange(self, ask: Ask) -> Answer:
        return self._budgets.exchange(ask, time.monotonic())

    def report(self, worker: str, figures: DownloadFigures) -> None:
        """Take a worker's figures so far, which outlast a restart of the hub."""
        self._figures[worker] = figures

    def total(self) -> DownloadFigures:
        """Return the figures of all workers."""
        return sum(self._figures.values(), DownloadFigures())


def _total(hub: Any, stall: Stall, timeout_s: float) -> DownloadFigures | None:
    """Return the figures of all workers, if the hub answers; say if they stall."""
    with suppress(RayError):  # Ray is lost, which the loop notices, or the hub restarts
        figures: DownloadFigures = ray.get(hub.total.remote(), timeout=timeout_s)
        detail = "" if figures.workers else "no worker has reported yet"
        so_far = figures.requests, figures.done
        stall.check(so_far, time.monotonic(), detail, busy=lambda: figures.workers > 0)
        return figures
    return None
