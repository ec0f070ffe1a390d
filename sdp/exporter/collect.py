"""One scrape: asks the driver, then all GPUs in parallel, and continues without late replies."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from prometheus_client import Metric as Family

from sdp.exporter.events import XidWatch
from sdp.exporter.metrics import Snapshot, families
from sdp.exporter.nvml import CallError, Calls, Driver, DriverReader, GpuReader, GpuReading, Identity
from sdp.exporter.processes import look_up
from sdp.exporter.reader_thread import ReaderThread

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Collector:
    """Prometheus' collector: each `collect` is one scrape. Concurrent scrapes share readings."""

    def __init__(self, node: str, *, timeout_s: float, proc: Path) -> None:
        self._node, self._timeout_s, self._proc = node, timeout_s, proc
        driver = DriverReader(self._count)
        self._driver = self._thread("driver", driver.read, driver.calls)
        self._gpus: dict[int, ReaderThread[GpuReading | None]] = {}
        self._xids = XidWatch()
        self._lock = threading.Lock()
        self._errors: Counter[CallError] = Counter()
        self._latest: CallError | None = None
        self._answered: dict[str, Identity] = {}
        self._logged = ""

    def _thread(self, name: str, read: Callable[[], T], calls: Calls) -> ReaderThread[T]:
        return ReaderThread(name, read, patience_s=self._timeout_s, calls=calls)

    def collect(self) -> Iterable[Family]:
        return families(self.scrape())

    def scrape(self) -> Snapshot:
        began = time.monotonic()
        until = began + self._timeout_s
        driver = self._wait(self._driver, self._driver.ask(), until)
        readings = self._ask_gpus(driver.gpus, until) if driver else {}
        gpus = tuple(gpu for gpu in readings.values() if gpu is not None)
        self._xids.watch({gpu.identity.uuid: gpu.identity.index for gpu in gpus if gpu.identity.uuid})
        owners = look_up({pid for gpu in gpus for pid in gpu.processes}, self._proc)
        up = driver is not None and (not readings or bool(gpus))
        self._log_changes(up, driver)
        with self._lock:
            self._answered.update((gpu.identity.uuid, gpu.identity) for gpu in gpus if gpu.identity.uuid)
            return Snapshot(
                node=self._node,
                up=up,
                driver=driver,
                gpus=gpus,
                lost=self._lost(gpus, readings),
                xids=self._xids.seen(),
                owners=owners,
                errors=dict(self._errors),
                read_seconds=time.monotonic() - began,
            )

    def _wait(self, thread: ReaderThread[T], reading: "Future[T]", until: float) -> T | None:
        """Return a thread's reading; count an error and return None if it is late or failed."""
        value, error = thread.answer(reading, until)
        if error:
            self._count(CallError(thread.calls.gpu, thread.calls.current or "read", error))
        return value

    def _ask_gpus(self, count: int, until: float) -> dict[int, GpuReading | None]:
        threads = [self._gpu(index) for index in range(count)]
        readings = [thread.ask() for thread in threads]
        return {index: self._wait(threads[index], reading, until) for index, reading in enumerate(readings)}

    def _gpu(self, index: int) -> ReaderThread[GpuReading | None]:
        with self._lock:
            if index not in self._gpus:
                gpu = GpuReader(index, self._count)
                self._gpus[index] = self._thread(f"gpu-{index}", gpu.read, gpu.calls)
            return self._gpus[index]

    def _lost(self, gpus: Iterable[GpuReading], indexes: Iterable[int]) -> tuple[Identity, ...]:
        """Return known GPUs that did not answer, and indexes that the driver counts but no known GPU has."""
        present = {gpu.identity.uuid for gpu in gpus}
        lost = [identity for uuid, identity in self._answered.items() if uuid not in present]
        named = {gpu.identity.index for gpu in gpus} | {identity.index for identity in lost}
        return (*lost, *(Identity(index) for index in indexes if index not in named))

    def _count(self, error: CallError) -> None:
        with self._lock:
            self._errors[error] += 1
            self._latest = error

    def _log_changes(self, up: bool, driver: Driver | None) -> None:
        """Log changes of the state, not every scrape."""
        with self._lock:
            cause = f"{self._latest.call}: {self._latest.error}" if self._latest else "no answer"
            readable = f"reading {driver.gpus} GPUs, driver {driver.version}" if up and driver else ""
            line = readable or f"no GPU can be read: {cause}"
            changed, self._logged = line != self._logged, line
        if changed:
            LOG.log(logging.INFO if up else logging.WARNING, "%s", line)
