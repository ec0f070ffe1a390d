"""One scrape: ask the driver, every GPU at once, /proc and the kubelet, and go on without who is late."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import Metric as Family

from sdp.exporter import podresources
from sdp.exporter.events import XidWatch
from sdp.exporter.grpc import CallFailed
from sdp.exporter.metrics import families
from sdp.exporter.nvml import Calls, DriverReader, DriverReading, GpuReader, GpuReading
from sdp.exporter.processes import Facts, Processes, owner_of
from sdp.exporter.readings import Allotment, CallError, Driver, Gpu, Identity, Owner, Snapshot
from sdp.exporter.worker import Answer, Worker

LOG = logging.getLogger(__name__)
FOR_DEVICES = 0.8
"""Share of a scrape's time for the driver and the kubelet; the rest is for /proc."""
MAX_GPUS = 64
"""No machine has more; a driver that says so is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the exporter was told."""

    node: str
    timeout_s: float = 2.0
    proc: Path = Path("/proc")
    pod_resources: Path | None = None
    """The kubelet's socket; None where there is none to ask."""


@dataclass(frozen=True, slots=True)
class _GpuWorker:
    reader: GpuReader
    worker: Worker[GpuReading]
    pcie: Worker[None]


class Collector:
    """Prometheus' collector: each `collect` is one scrape. Any number at once; they share readings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        patience_s = settings.timeout_s * FOR_DEVICES
        self._driver_reader = DriverReader()
        self._driver = Worker("driver", self._read_driver, patience_s=patience_s)
        self._gpus: dict[int, _GpuWorker] = {}
        self._kubelet = Worker("kubelet", self._read_kubelet, patience_s=patience_s)
        self._processes = Processes(settings.proc)
        self._pids: frozenset[int] = frozenset()
        self._looking = Worker("processes", self._look_up, patience_s=patience_s)
        self._facts: Mapping[int, Facts | None] = {}
        self._xids = XidWatch()
        self._lock = threading.Lock()
        self._errors: dict[CallError, int] = {}
        self._latest: CallError | None = None
        self._answered: dict[str, tuple[Identity, float]] = {}
        self._up_at: float | None = None
        self._told = ""

    def collect(self) -> Iterable[Family]:
        return families(self.scrape())

    def scrape(self) -> Snapshot:
        began = time.monotonic()
        devices_until = began + self._settings.timeout_s * FOR_DEVICES
        kubelet_ticket = self._kubelet.ask() if self._settings.pod_resources else None
        driver = self._ask_driver(devices_until)
        readings = self._ask_gpus(driver.gpus, devices_until) if driver else {}
        gpus = tuple(reading.gpu for reading in readings.values() if reading is not None and reading.gpu is not None)
        self._xids.watch({gpu.identity.uuid: gpu.identity.index for gpu in gpus if gpu.identity.uuid})
        allotments = self._allotments(kubelet_ticket, devices_until)
        facts = self._ask_proc(gpus, began + self._settings.timeout_s)
        up = driver is not None and (not readings or bool(gpus))
        self._tell(up, driver)
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
                owners=_owners(gpus, facts, allotments or {}),
                process_states=_states(gpus, facts),
                allotments=allotments or {},
                kubelet_up=None if kubelet_ticket is None else allotments is not None,
                errors=dict(self._errors),
                read_seconds=now - began,
            )

    def stop(self) -> None:
        """End the threads that are idle. Those that hang in the driver cannot be ended; they are daemons."""
        self._xids.stop()
        for worker in self._workers():
            worker.stop()

    def _workers(self) -> list[Worker[Any]]:
        with self._lock:
            gpus = [worker for one in self._gpus.values() for worker in (one.worker, one.pcie)]
            return [self._driver, self._kubelet, self._looking, *gpus]

    # The driver

    def _read_driver(self) -> DriverReading:
        reading = self._driver_reader.read()
        self._count(reading.errors)
        return reading

    def _ask_driver(self, until: float) -> Driver | None:
        answer = self._driver.answer(self._driver.ask(), until)
        self._count_lateness(answer, self._driver_reader.calls, "")
        return answer.value.driver if answer.value is not None else None

    # GPUs

    def _ask_gpus(self, count: int, until: float) -> dict[int, GpuReading | None]:
        workers = [self._gpu(index) for index in range(min(count, MAX_GPUS))]
        tickets = [one.worker.ask() for one in workers]
        readings: dict[int, GpuReading | None] = {}
        for one, ticket in zip(workers, tickets, strict=True):
            answer = one.worker.answer(ticket, until)
            self._count_lateness(answer, one.reader.calls, str(one.reader.index))
            readings[one.reader.index] = answer.value
            self._sample_pcie(one)
        return readings

    def _sample_pcie(self, one: _GpuWorker) -> None:
        """For the next scrape: nobody waits for it."""
        one.pcie.ask()
        if one.pcie.stuck:
            self._count((CallError(str(one.reader.index), one.reader.pcie.calls.current, "timeout"),))

    def _gpu(self, index: int) -> _GpuWorker:
        with self._lock:
            if index not in self._gpus:
                reader = GpuReader(index)

                def read() -> GpuReading:
                    reading = reader.read()
                    self._count(reading.errors)
                    return reading

                def sample() -> None:
                    self._count(reader.pcie.read())

                patience_s = self._settings.timeout_s * FOR_DEVICES
                worker = Worker(f"gpu-{index}", read, patience_s=patience_s)
                self._gpus[index] = _GpuWorker(reader, worker, Worker(f"pcie-{index}", sample, patience_s=patience_s))
            return self._gpus[index]

    def _lost(self, gpus: Iterable[Gpu], readings: Mapping[int, GpuReading | None]) -> tuple[Identity, ...]:
        """Known GPUs that did not answer; and indexes that the driver counts and no known GPU had."""
        here = {gpu.identity.uuid for gpu in gpus}
        lost = [identity for uuid, (identity, _) in self._answered.items() if uuid not in here]
        named = {gpu.identity.index for gpu in gpus} | {identity.index for identity in lost}
        return (*lost, *(Identity(index) for index in readings if index not in named))

    # Processes and pods

    def _look_up(self) -> Mapping[int, Facts | None]:
        with self._lock:
            pids = self._pids
        return self._processes.look_up(sorted(pids))

    def _ask_proc(self, gpus: Iterable[Gpu], until: float) -> Mapping[int, Facts | None]:
        """What is known from before where /proc does not answer (reading an environment may hang with its process)."""
        pids = frozenset(process.pid for gpu in gpus for process in gpu.processes)
        if not pids:
            return {}
        with self._lock:
            self._pids = pids
        answer = self._looking.answer(self._looking.ask(), until)
        if answer.value is None:
            self._count((CallError("", "proc", "timeout" if answer.late else "failed"),))
            with self._lock:
                return self._facts
        with self._lock:
            self._facts = answer.value
        return answer.value

    def _read_kubelet(self) -> Mapping[str, tuple[Allotment, ...]] | None:
        path = self._settings.pod_resources
        assert path is not None, "asked only where there is a socket"
        try:
            return podresources.list_allotments(path, timeout_s=self._settings.timeout_s * FOR_DEVICES)
        except CallFailed as error:
            LOG.debug("pod-resources: %s", error)
            self._count((CallError("", "pod-resources", "failed"),))
            return None

    def _allotments(self, ticket: int | None, until: float) -> Mapping[str, tuple[Allotment, ...]] | None:
        if ticket is None:
            return None
        answer = self._kubelet.answer(ticket, until)
        if answer.late:
            self._count((CallError("", "pod-resources", "timeout"),))
        return answer.value

    # What went wrong

    def _count(self, errors: Iterable[CallError]) -> None:
        with self._lock:
            for error in errors:
                self._errors[error] = self._errors.get(error, 0) + 1
                self._latest = error

    def _count_lateness(self, answer: Answer[GpuReading] | Answer[DriverReading], calls: Calls, gpu: str) -> None:
        if answer.late:
            self._count((CallError(gpu, calls.current or "read", "timeout"),))
        elif answer.value is None:
            self._count((CallError(gpu, calls.current or "read", "exception"),))

    def _tell(self, up: bool, driver: Driver | None) -> None:
        """Into the log when it changes, not at each scrape."""
        with self._lock:
            why = f"{self._latest.call}: {self._latest.error}" if self._latest else "no answer"
            line = (
                f"reading {driver.gpus} GPUs, driver {driver.version}"
                if up and driver
                else f"no GPU can be read: {why}"
            )
            changed, self._told = line != self._told, line
        if changed:
            LOG.log(logging.INFO if up else logging.WARNING, "%s", line)


def _owners(
    gpus: Iterable[Gpu], facts: Mapping[int, Facts | None], allotments: Mapping[str, tuple[Allotment, ...]]
) -> dict[tuple[int, str, int], Owner]:
    owners = {}
    for gpu in gpus:
        whole = podresources.of_device(allotments, uuid=gpu.identity.uuid, minor=gpu.identity.minor)
        for process in gpu.processes:
            allotted = podresources.of_device(allotments, uuid=process.mig_uuid) if process.mig_uuid else whole
            key = (gpu.identity.index, process.mig_uuid, process.pid)
            owners[key] = owner_of(facts.get(process.pid), allotted)
    return owners


def _states(gpus: Iterable[Gpu], facts: Mapping[int, Facts | None]) -> dict[str, int]:
    states = {"known": 0, "unreadable": 0, "unknown": 0}
    for pid in {process.pid for gpu in gpus for process in gpu.processes}:
        one = facts.get(pid)
        states["unknown" if one is None else "known" if one.readable else "unreadable"] += 1
    return states
