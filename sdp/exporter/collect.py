"""One scrape: asks the driver, all GPUs in parallel, /proc and the kubelet, and continues without late replies."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prometheus_client import Metric as Family

from sdp.exporter import podresources
from sdp.exporter.events import XidWatch
from sdp.exporter.grpc import CallFailed
from sdp.exporter.metrics import Snapshot, families
from sdp.exporter.nvml import CallError, Calls, Driver, DriverReader, Gpu, GpuReader, Identity
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


@dataclass(frozen=True, slots=True)
class _GpuThreads:
    """The threads that read one GPU."""

    reader: GpuReader
    gpu: ReaderThread[Gpu | None]
    pcie: ReaderThread[None]


class Collector:
    """Prometheus' collector: each `collect` is one scrape. Concurrent scrapes share readings.

    `pod_resources` is the kubelet's socket; None if there is none.
    """

    def __init__(self, node: str, *, timeout_s: float, proc: Path, pod_resources: Path | None) -> None:
        self._node, self._timeout_s, self._pod_resources = node, timeout_s, pod_resources
        self._patience_s = timeout_s * FOR_DEVICES
        self._driver_reader = DriverReader(self._count)
        self._driver = ReaderThread("driver", self._driver_reader.read, patience_s=self._patience_s)
        self._gpus: dict[int, _GpuThreads] = {}
        self._kubelet = ReaderThread("pod-resources", self._read_kubelet, patience_s=self._patience_s)
        self._processes = Processes(proc)
        self._pids: frozenset[int] = frozenset()
        self._proc = ReaderThread("proc", self._read_proc, patience_s=self._patience_s)
        self._facts: Mapping[int, Facts | None] = {}
        self._xids = XidWatch()
        self._lock = threading.Lock()
        self._errors: Counter[CallError] = Counter()
        self._latest: CallError | None = None
        self._answered: dict[str, tuple[Identity, float]] = {}
        self._up_at: float | None = None
        self._logged = ""

    def collect(self) -> Iterable[Family]:
        return families(self.scrape())

    def scrape(self) -> Snapshot:
        began = time.monotonic()
        devices_until = began + self._patience_s
        kubelet_reading = self._kubelet.ask() if self._pod_resources else None
        driver = self._wait(self._driver, self._driver.ask(), devices_until, self._driver_reader.calls)
        readings = self._ask_gpus(driver.gpus, devices_until) if driver else {}
        gpus = tuple(gpu for gpu in readings.values() if gpu is not None)
        self._xids.watch({gpu.identity.uuid: gpu.identity.index for gpu in gpus if gpu.identity.uuid})
        kubelet_up: bool | None = None
        allotments: Allotments = {}
        if kubelet_reading is not None:
            reply = self._wait(self._kubelet, kubelet_reading, devices_until)
            kubelet_up, allotments = reply or (False, {})
        facts = self._ask_proc(gpus, began + self._timeout_s)
        up = driver is not None and (not readings or bool(gpus))
        self._log_changes(up, driver)
        now = time.monotonic()
        with self._lock:
            self._answered.update((gpu.identity.uuid, (gpu.identity, now)) for gpu in gpus if gpu.identity.uuid)
            self._up_at = now if up else self._up_at
            return Snapshot(
                node=self._node,
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

    def _wait(
        self, thread: ReaderThread[T], reading: "Future[T]", until: float, calls: Calls | None = None
    ) -> T | None:
        """Return a thread's reading; count an error and return None if it is late or failed."""
        result = thread.answer(reading, until)
        if result.error:
            gpu, call = (calls.gpu, calls.current or "read") if calls else ("", thread.name)
            self._count(CallError(gpu, call, result.error))
        return result.value

    def _ask_gpus(self, count: int, until: float) -> dict[int, Gpu | None]:
        by_gpu = [self._gpu(index) for index in range(min(count, MAX_GPUS))]
        readings = [threads.gpu.ask() for threads in by_gpu]
        gpus: dict[int, Gpu | None] = {}
        for index, (threads, reading) in enumerate(zip(by_gpu, readings, strict=True)):
            gpus[index] = self._wait(threads.gpu, reading, until, threads.reader.calls)
            threads.pcie.ask()  # for the next scrape, so nothing waits for it here
            if threads.pcie.stuck:
                self._count(CallError(str(index), threads.reader.pcie.calls.current, "timeout"))
        return gpus

    def _gpu(self, index: int) -> _GpuThreads:
        with self._lock:
            if index not in self._gpus:
                reader = GpuReader(index, self._count)
                gpu = ReaderThread(f"gpu-{index}", reader.read, patience_s=self._patience_s)
                pcie = ReaderThread(f"pcie-{index}", reader.pcie.read, patience_s=self._patience_s)
                self._gpus[index] = _GpuThreads(reader, gpu, pcie)
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
        facts = self._wait(self._proc, self._proc.ask(), until)
        with self._lock:
            self._facts = self._facts if facts is None else facts
            return self._facts

    def _read_kubelet(self) -> tuple[bool, Allotments]:
        assert self._pod_resources is not None, "asked only if there is a socket"
        try:
            return True, podresources.list_allotments(self._pod_resources, timeout_s=self._patience_s)
        except CallFailed as error:
            LOG.debug("pod-resources: %s", error)
            self._count(CallError("", "pod-resources", "failed"))
            return False, {}

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
