"""One scrape: asks the driver, all GPUs in parallel, /proc and the kubelet, and continues without late replies."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Metric as Family

from sdp.exporter import podresources
from sdp.exporter.events import XidWatch
from sdp.exporter.grpc import CallFailed
from sdp.exporter.metrics import Snapshot, families
from sdp.exporter.nvml import CallError, Driver, DriverReader, Gpu, GpuReader, Identity, Reading
from sdp.exporter.podresources import Allotment
from sdp.exporter.processes import Facts, Owner, Processes, owner_of
from sdp.exporter.reader_thread import ReaderThread

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Allotments = Mapping[str, tuple[Allotment, ...]]
FOR_DEVICES = 0.8
"""Share of a scrape's time for the driver and the kubelet; /proc gets the rest."""
MAX_GPUS = 64
"""Limit on the GPUs that a driver may report; no machine has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSettings:
    """The exporter's options."""

    node: str
    timeout_s: float = 2.0
    proc: Path = Path("/proc")
    pod_resources: Path | None = None
    """The kubelet's socket; None if there is none."""


@dataclass(frozen=True, slots=True)
class _GpuThreads:
    """The threads that read one GPU."""

    reader: GpuReader
    readings: ReaderThread[Reading[Gpu]]
    pcie: ReaderThread[None]


class Collector:
    """Prometheus' collector: each `collect` is one scrape. Concurrent scrapes share readings."""

    def __init__(self, settings: ExporterSettings) -> None:
        self._settings = settings
        self._patience_s = settings.timeout_s * FOR_DEVICES
        self._driver_reader = DriverReader()
        self._driver = ReaderThread("driver", self._read_driver, patience_s=self._patience_s)
        self._gpus: dict[int, _GpuThreads] = {}
        self._kubelet = ReaderThread("kubelet", self._read_kubelet, patience_s=self._patience_s)
        self._processes = Processes(settings.proc)
        self._pids: frozenset[int] = frozenset()
        self._proc = ReaderThread("processes", self._read_proc, patience_s=self._patience_s)
        self._facts: Mapping[int, Facts | None] = {}
        self._xids = XidWatch()
        self._lock = threading.Lock()
        self._errors: dict[CallError, int] = {}
        self._latest: CallError | None = None
        self._answered: dict[str, tuple[Identity, float]] = {}
        self._up_at: float | None = None
        self._logged = ""

    def collect(self) -> Iterable[Family]:
        return families(self.scrape())

    def scrape(self) -> Snapshot:
        began = time.monotonic()
        devices_until = began + self._patience_s
        kubelet_ticket = self._kubelet.ask() if self._settings.pod_resources else None
        driver = self._ask_driver(devices_until)
        readings = self._ask_gpus(driver.gpus, devices_until) if driver else {}
        gpus = tuple(gpu for gpu in readings.values() if gpu is not None)
        self._xids.watch({gpu.identity.uuid: gpu.identity.index for gpu in gpus if gpu.identity.uuid})
        kubelet_up: bool | None = None
        allotments: Allotments = {}
        if kubelet_ticket is not None:
            reply = self._wait(self._kubelet, kubelet_ticket, devices_until, lambda: "pod-resources")
            kubelet_up, allotments = reply or (False, {})
        facts = self._ask_proc(gpus, began + self._settings.timeout_s)
        up = driver is not None and (not readings or bool(gpus))
        self._log_changes(up, driver)
        now = time.monotonic()
        with self._lock:
            self._answered.update((gpu.identity.uuid, (gpu.identity, now)) for gpu in gpus if gpu.identity.uuid)
            self._up_at = now if up else self._up_at
            return Snapshot(
                node=self._settings.node,
                up=up,
                driver=driver,
                gpus=gpus,
                lost=self._lost(gpus, readings),
                ages={identity: now - at for identity, at in self._answered.values()},
                age=None if self._up_at is None else now - self._up_at,
                xids=self._xids.seen(),
                owners=_owners(gpus, facts, allotments),
                process_states=_states(gpus, facts),
                allotments=allotments,
                kubelet_up=kubelet_up,
                errors=dict(self._errors),
                read_seconds=now - began,
            )

    def stop(self) -> None:
        """End the idle threads. Threads that hang in the driver cannot be ended; they are daemons."""
        self._xids.stop()
        with self._lock:
            gpus = [thread for threads in self._gpus.values() for thread in (threads.readings, threads.pcie)]
        all_threads: list[ReaderThread[Any]] = [self._driver, self._kubelet, self._proc, *gpus]
        for thread in all_threads:
            thread.stop()

    def _wait(
        self, thread: ReaderThread[T], ticket: int, until: float, call: Callable[[], str], *, gpu: str = ""
    ) -> T | None:
        """Return a thread's reading; count an error and return None if it is late or failed."""
        answer = thread.answer(ticket, until)
        if answer.value is None:
            self._count([CallError(gpu, call() or "read", "timeout" if answer.late else "exception")])
        return answer.value

    def _read_driver(self) -> Reading[Driver]:
        reading = self._driver_reader.read()
        self._count(reading.errors)
        return reading

    def _ask_driver(self, until: float) -> Driver | None:
        reading = self._wait(self._driver, self._driver.ask(), until, self._driver_reader.current_call)
        return reading.value if reading else None

    def _ask_gpus(self, count: int, until: float) -> dict[int, Gpu | None]:
        by_gpu = [self._gpu(index) for index in range(min(count, MAX_GPUS))]
        tickets = [threads.readings.ask() for threads in by_gpu]
        gpus: dict[int, Gpu | None] = {}
        for index, (threads, ticket) in enumerate(zip(by_gpu, tickets, strict=True)):
            reading = self._wait(threads.readings, ticket, until, threads.reader.current_call, gpu=str(index))
            gpus[index] = reading.value if reading else None
            threads.pcie.ask()  # for the next scrape, so nothing waits for it here
            if threads.pcie.stuck:
                self._count([CallError(str(index), threads.reader.pcie.calls.current, "timeout")])
        return gpus

    def _gpu(self, index: int) -> _GpuThreads:
        with self._lock:
            if index not in self._gpus:
                reader = GpuReader(index)

                def read() -> Reading[Gpu]:
                    reading = reader.read()
                    self._count(reading.errors)
                    return reading

                readings = ReaderThread(f"gpu-{index}", read, patience_s=self._patience_s)
                pcie = ReaderThread(
                    f"pcie-{index}", lambda: self._count(reader.pcie.read()), patience_s=self._patience_s
                )
                self._gpus[index] = _GpuThreads(reader, readings, pcie)
            return self._gpus[index]

    def _lost(self, gpus: Iterable[Gpu], indexes: Iterable[int]) -> tuple[Identity, ...]:
        """Return known GPUs that did not answer, and indexes that the driver counts but no known GPU has."""
        present = {gpu.identity.uuid for gpu in gpus}
        lost = [identity for uuid, (identity, _) in self._answered.items() if uuid not in present]
        named = {gpu.identity.index for gpu in gpus} | {identity.index for identity in lost}
        return (*lost, *(Identity(index) for index in indexes if index not in named))

    def _read_proc(self) -> Mapping[int, Facts | None]:
        with self._lock:
            pids = self._pids
        return self._processes.look_up(sorted(pids))

    def _ask_proc(self, gpus: Iterable[Gpu], until: float) -> Mapping[int, Facts | None]:
        """Return the processes' properties; the previous ones if /proc hangs, as it may together with a process."""
        pids = frozenset(process.pid for gpu in gpus for process in gpu.processes)
        if not pids:
            return {}
        with self._lock:
            self._pids = pids
        facts = self._wait(self._proc, self._proc.ask(), until, lambda: "proc")
        with self._lock:
            self._facts = self._facts if facts is None else facts
            return self._facts

    def _read_kubelet(self) -> tuple[bool, Allotments]:
        path = self._settings.pod_resources
        assert path is not None, "asked only if there is a socket"
        try:
            return True, podresources.list_allotments(path, timeout_s=self._patience_s)
        except CallFailed as error:
            LOG.debug("pod-resources: %s", error)
            self._count([CallError("", "pod-resources", "failed")])
            return False, {}

    def _count(self, errors: Iterable[CallError]) -> None:
        with self._lock:
            for error in errors:
                self._errors[error] = self._errors.get(error, 0) + 1
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


def _owners(
    gpus: Iterable[Gpu], facts: Mapping[int, Facts | None], allotments: Allotments
) -> dict[tuple[int, str, int], Owner]:
    owners = {}
    for gpu in gpus:
        whole_gpu = podresources.of_device(allotments, uuid=gpu.identity.uuid, minor=gpu.identity.minor)
        for process in gpu.processes:
            allotted = podresources.of_device(allotments, uuid=process.mig_uuid) if process.mig_uuid else whole_gpu
            key = (gpu.identity.index, process.mig_uuid, process.pid)
            owners[key] = owner_of(facts.get(process.pid), allotted)
    return owners


def _states(gpus: Iterable[Gpu], facts: Mapping[int, Facts | None]) -> dict[str, int]:
    states = {"known": 0, "unreadable": 0, "unknown": 0}
    for pid in {process.pid for gpu in gpus for process in gpu.processes}:
        process = facts.get(pid)
        states["unknown" if process is None else "known" if process.readable else "unreadable"] += 1
    return states
