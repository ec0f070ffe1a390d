"""Reads NVML, the driver's library: one class for the driver as a whole, one for each GPU.

A call that the hardware or the driver does not support gives None. A call that fails gives None as well, and an error
in the reading. Calls may hang for as long as they like: whoever calls this does so in a thread of its own (worker.py).
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

from sdp.exporter.readings import (
    CallError,
    Clocks,
    Driver,
    Gpu,
    GpuProcess,
    Health,
    Identity,
    Memory,
    MigSlice,
    Nvlink,
    Pcie,
    Power,
    Thermal,
    Utilization,
)

UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""What an older driver or a smaller GPU answers; no fault."""
GONE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
)
"""After one of these, asking the same GPU for more is useless."""
ABSENT = frozenset({pynvml.NVML_ERROR_NOT_FOUND})

_ERROR_NAMES: Mapping[int, str] = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}
CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}
THROTTLE_REASONS = {
    "gpu_idle": pynvml.nvmlClocksThrottleReasonGpuIdle,
    "applications_clocks_setting": pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
    "sw_power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "sync_boost": pynvml.nvmlClocksThrottleReasonSyncBoost,
    "sw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake_slowdown": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "display_clock_setting": pynvml.nvmlClocksThrottleReasonDisplayClockSetting,
}
THROTTLE_CAUSES = {
    "power": pynvml.NVML_PERF_POLICY_POWER,
    "thermal": pynvml.NVML_PERF_POLICY_THERMAL,
    "sync_boost": pynvml.NVML_PERF_POLICY_SYNC_BOOST,
    "board_limit": pynvml.NVML_PERF_POLICY_BOARD_LIMIT,
    "low_utilization": pynvml.NVML_PERF_POLICY_LOW_UTILIZATION,
    "reliability": pynvml.NVML_PERF_POLICY_RELIABILITY,
}
TEMPERATURE_LIMITS = {
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "memory_max": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "gpu_max": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}
ECC_KINDS = {
    "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}
ECC_SINCE = {"driver_load": pynvml.NVML_VOLATILE_ECC, "lifetime": pynvml.NVML_AGGREGATE_ECC}

_ALL_LINKS = 0xFFFFFFFF
FIELDS: Mapping[str, tuple[int, int]] = {
    "memory_temperature": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0),
    "nvlink_transmit_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
    "nvlink_receive_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
    "nvlink_links": (pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0),
    "nvlink_crc_flit": (pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
    "nvlink_crc_data": (pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
    "nvlink_replay": (pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
    "nvlink_recovery": (pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
    "retired_corrected": (pynvml.NVML_FI_DEV_RETIRED_SBE, 0),
    "retired_uncorrected": (pynvml.NVML_FI_DEV_RETIRED_DBE, 0),
    "retired_pending": (pynvml.NVML_FI_DEV_RETIRED_PENDING, 0),
}
"""Values that NVML gives by number, all in one call: (field, scope)."""
_FIELD_ABSENT = UNSUPPORTED | {
    pynvml.NVML_ERROR_INVALID_ARGUMENT,  # a field that this driver does not know
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
}
_UNION_MEMBER = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

PCIE_SAMPLE_MAX_AGE_S = 300.0
"""A sample is taken after each scrape for the next one; with an exporter that nobody scraped for long it is no news."""


class Gone(Exception):
    """The GPU, or the driver, cannot be asked any more in this reading."""


class Calls:
    """Calls NVML and keeps what went wrong."""

    def __init__(self, gpu: str = "") -> None:
        self.errors: list[CallError] = []
        self.current = ""
        """The call that is under way, or was the last: told of one that hangs."""
        self._gpu = gpu

    def __call__(self, function: str, *arguments: Any, absent: frozenset[int] = frozenset()) -> Any:
        """The result; None where it is unsupported, absent or failed.

        Raises:
            Gone: The GPU is lost, or the driver is.
        """
        self.current = function
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            code = int(error.value)
            if code in UNSUPPORTED or code in absent:
                return None
            self.failed(function, code)
            if code in GONE:
                raise Gone from error
            return None

    def first(self, *alternatives: tuple[Any, ...], absent: frozenset[int] = frozenset()) -> Any:
        """The result of the first call that has one: newer ways of asking first, then what older drivers know."""
        for function, *arguments in alternatives:
            if (value := self(function, *arguments, absent=absent)) is not None:
                return value
        return None

    def failed(self, call: str, code: int) -> None:
        self.errors.append(CallError(self._gpu, call, _ERROR_NAMES.get(code, f"code_{code}")))


@dataclass(frozen=True, slots=True)
class DriverReading:
    driver: Driver | None
    errors: tuple[CallError, ...]


@dataclass(frozen=True, slots=True)
class GpuReading:
    index: int
    gpu: Gpu | None
    errors: tuple[CallError, ...]


class DriverReader:
    """Opens the library, again and again until there is one, and counts the GPUs."""

    def __init__(self) -> None:
        self._open = False
        self.calls = Calls()

    def read(self) -> DriverReading:
        self.calls = calls = Calls()
        driver = None
        try:
            if not self._open:
                calls("nvmlInit")
                self._open = not calls.errors
            count = calls("nvmlDeviceGetCount") if self._open else None
            if count is not None:
                cuda = calls("nvmlSystemGetCudaDriverVersion_v2")
                driver = Driver(
                    gpus=count,
                    version=calls("nvmlSystemGetDriverVersion") or "",
                    nvml=calls("nvmlSystemGetNVMLVersion") or "",
                    cuda="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
                )
        except Gone:
            # Not closed: another thread may be in a call. A second init of an open library does no harm.
            self._open = False
        return DriverReading(driver, tuple(calls.errors))


class PcieSampler:
    """Measures PCIe's throughput for the next reading: NVML takes 20 ms for each direction, too long for a scrape."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.calls = Calls(str(index))
        self._sample: tuple[float, int | None, int | None] | None = None

    def read(self) -> tuple[CallError, ...]:
        """Take a sample; what went wrong."""
        self.calls = calls = Calls(str(self._index))
        try:
            handle = calls("nvmlDeviceGetHandleByIndex", self._index)
            if handle is not None:
                sent = calls("nvmlDeviceGetPcieThroughput", handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
                received = calls("nvmlDeviceGetPcieThroughput", handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
                self._sample = (time.monotonic(), sent, received)
        except Gone:
            self._sample = None
        return tuple(calls.errors)

    def latest(self) -> tuple[int | None, int | None]:
        """Kilobytes per second, sent and received; nothing where the sample is old."""
        sample = self._sample
        if sample is None or time.monotonic() - sample[0] > PCIE_SAMPLE_MAX_AGE_S:
            return None, None
        return sample[1:]


class GpuReader:
    """Reads one GPU. Not for two threads at once."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls = Calls(str(index))
        self._identities: dict[int, Identity] = {}
        self._last_sample_us = 0
        self.pcie = PcieSampler(index)

    def read(self) -> GpuReading:
        self.calls = calls = Calls(str(self.index))
        gpu = None
        try:
            handle = calls("nvmlDeviceGetHandleByIndex", self.index)
            if handle is not None:
                gpu = self._read(calls, handle)
        except Gone:
            self._identities.clear()
        return GpuReading(self.index, gpu, tuple(calls.errors))

    def _read(self, calls: Calls, handle: Any) -> Gpu:
        identity = self._identity(calls, handle)
        fields = _read_fields(calls, handle)
        mode = calls("nvmlDeviceGetMigMode", handle)
        mig = bool(mode and mode[0])
        slices = tuple(_read_slices(calls, handle)) if mig else ()
        return Gpu(
            identity=identity,
            utilization=_read_utilization(calls, handle),
            memory=_read_memory(calls, handle),
            power=_read_power(calls, handle),
            thermal=_read_thermal(calls, handle, fields),
            clocks=_read_clocks(calls, handle),
            pcie=self._read_pcie(calls, handle),
            nvlink=_read_nvlink(calls, handle, fields),
            health=_read_health(calls, handle, fields),
            mig=mig,
            slices=tuple(one for one, _ in slices),
            processes=self._read_processes(calls, handle, slices),
        )

    def _identity(self, calls: Calls, handle: Any) -> Identity:
        """Read once for each handle: it names the same GPU for as long as the driver is loaded."""
        address = address_of(handle)
        if address in self._identities:
            return self._identities[address]
        uuid = calls("nvmlDeviceGetUUID", handle)
        pci = calls("nvmlDeviceGetPciInfo", handle)
        identity = Identity(
            index=self.index,
            uuid=uuid or "",
            product=calls("nvmlDeviceGetName", handle) or "",
            pci_bus_id=str(pci.busId) if pci is not None else "",
            minor=calls("nvmlDeviceGetMinorNumber", handle),
            vbios=calls("nvmlDeviceGetVbiosVersion", handle) or "",
        )
        if uuid:
            self._identities = {address: identity}
        return identity

    def _read_pcie(self, calls: Calls, handle: Any) -> Pcie:
        sent, received = self.pcie.latest()
        return Pcie(
            transmit=_scaled(sent, 1000),
            receive=_scaled(received, 1000),
            replays=calls("nvmlDeviceGetPcieReplayCounter", handle),
            generation=calls("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            generation_max=calls("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            width=calls("nvmlDeviceGetCurrPcieLinkWidth", handle),
            width_max=calls("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )

    def _read_processes(
        self, calls: Calls, handle: Any, slices: Sequence[tuple[MigSlice, Any]]
    ) -> tuple[GpuProcess, ...]:
        """With MIG on, processes belong to slices; the GPU as a whole would list them a second time."""
        if slices:
            return tuple(p for one, inner in slices for p in _list_processes(calls, inner, one.uuid))
        processes = list(_list_processes(calls, handle, ""))
        busy = self._process_utilization(calls, handle) if processes else None
        if busy is None:
            return tuple(processes)
        return tuple(replace(process, sm_utilization=busy.get(process.pid)) for process in processes)

    def _process_utilization(self, calls: Calls, handle: Any) -> dict[int, float] | None:
        """Mean of each process's samples since the reading before; None where the driver keeps none at all."""
        calls.current = "nvmlDeviceGetProcessUtilization"
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, self._last_sample_us)
        except pynvml.NVMLError as error:
            # "Not found" is no new sample; pynvml raises "success" where there is nothing to copy.
            if error.value in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS):
                return {}
            if error.value not in UNSUPPORTED:
                calls.failed(calls.current, int(error.value))
            return None
        by_pid: dict[int, list[int]] = {}
        for sample in samples:
            if sample.smUtil <= 100:  # of a process that has just ended, the driver tells nonsense
                by_pid.setdefault(sample.pid, []).append(sample.smUtil)
            self._last_sample_us = max(self._last_sample_us, sample.timeStamp)
        return {pid: sum(values) / len(values) / 100 for pid, values in by_pid.items()}


def address_of(handle: Any) -> int:
    """Handles are pointers: two of one GPU are the same address."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _read_fields(calls: Calls, handle: Any) -> dict[str, float]:
    values = calls("nvmlDeviceGetFieldValues", handle, list(FIELDS.values()))
    found: dict[str, float] = {}
    for name, value in zip(FIELDS, values or (), strict=False):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            found[name] = getattr(value.value, _UNION_MEMBER.get(value.valueType, "ullVal"))
        elif value.nvmlReturn not in _FIELD_ABSENT:
            calls.failed(f"nvmlDeviceGetFieldValues:{name}", int(value.nvmlReturn))
    return found


def _read_utilization(calls: Calls, handle: Any) -> Utilization:
    rates = calls("nvmlDeviceGetUtilizationRates", handle)
    encoder = calls("nvmlDeviceGetEncoderUtilization", handle)
    decoder = calls("nvmlDeviceGetDecoderUtilization", handle)
    return Utilization(
        gpu=_ratio(rates.gpu if rates is not None else None),
        memory=_ratio(rates.memory if rates is not None else None),
        encoder=_ratio(encoder[0] if encoder else None),
        decoder=_ratio(decoder[0] if decoder else None),
    )


def _read_memory(calls: Calls, handle: Any) -> Memory:
    """The newer call counts what the driver keeps apart; the older one counts it as used."""
    newer = calls("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    if newer is not None:
        return Memory(total=newer.total, used=newer.used, free=newer.free, reserved=newer.reserved)
    older = calls("nvmlDeviceGetMemoryInfo", handle)
    if older is not None:
        return Memory(total=older.total, used=older.used, free=older.free)
    return Memory()


def _read_power(calls: Calls, handle: Any) -> Power:
    return Power(
        usage=_scaled(calls("nvmlDeviceGetPowerUsage", handle), 1e-3),
        limit=_scaled(calls("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
        energy=_scaled(calls("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
    )


def _read_thermal(calls: Calls, handle: Any, fields: Mapping[str, float]) -> Thermal:
    sensor = pynvml.NVML_TEMPERATURE_GPU
    limits = {
        name: calls("nvmlDeviceGetTemperatureThreshold", handle, number) for name, number in TEMPERATURE_LIMITS.items()
    }
    return Thermal(
        gpu=calls.first(("nvmlDeviceGetTemperatureV", handle, sensor), ("nvmlDeviceGetTemperature", handle, sensor)),
        memory=fields.get("memory_temperature"),
        limits={name: value for name, value in limits.items() if value is not None},
        fan=_ratio(calls("nvmlDeviceGetFanSpeed", handle)),
    )


def _read_clocks(calls: Calls, handle: Any) -> Clocks:
    now = {name: calls("nvmlDeviceGetClockInfo", handle, number) for name, number in CLOCKS.items()}
    highest = {name: calls("nvmlDeviceGetMaxClockInfo", handle, number) for name, number in CLOCKS.items()}
    bits = calls.first(
        ("nvmlDeviceGetCurrentClocksEventReasons", handle), ("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    )
    violations = {
        name: calls("nvmlDeviceGetViolationStatus", handle, number) for name, number in THROTTLE_CAUSES.items()
    }
    return Clocks(
        now={name: mhz * 1e6 for name, mhz in now.items() if mhz is not None},
        highest={name: mhz * 1e6 for name, mhz in highest.items() if mhz is not None},
        reasons={} if bits is None else {name: bool(bits & bit) for name, bit in THROTTLE_REASONS.items()},
        throttled={name: status.violationTime / 1e9 for name, status in violations.items() if status is not None},
        performance_state=_performance_state(calls("nvmlDeviceGetPerformanceState", handle)),
    )


def _performance_state(state: int | None) -> int | None:
    return None if state == pynvml.NVML_PSTATE_UNKNOWN else state


def _read_nvlink(calls: Calls, handle: Any, fields: Mapping[str, float]) -> Nvlink:
    links = int(fields["nvlink_links"]) if "nvlink_links" in fields else None
    active = None
    if links:
        states = [calls("nvmlDeviceGetNvLinkState", handle, link) for link in range(links)]
        if any(state is not None for state in states):
            active = sum(bool(state) for state in states)
    kinds = ("crc_flit", "crc_data", "replay", "recovery")
    return Nvlink(
        transmit=_scaled(fields.get("nvlink_transmit_kib"), 1024),
        receive=_scaled(fields.get("nvlink_receive_kib"), 1024),
        links=links,
        active=active,
        errors={kind: fields[f"nvlink_{kind}"] for kind in kinds if f"nvlink_{kind}" in fields},
    )


def _read_health(calls: Calls, handle: Any, fields: Mapping[str, float]) -> Health:
    ecc = {
        (kind, since): calls("nvmlDeviceGetTotalEccErrors", handle, number, counter)
        for kind, number in ECC_KINDS.items()
        for since, counter in ECC_SINCE.items()
    }
    rows = calls("nvmlDeviceGetRemappedRows", handle)
    causes = ("corrected", "uncorrected")
    return Health(
        ecc={key: value for key, value in ecc.items() if value is not None},
        remapped=dict(zip(causes, rows[:2], strict=True)) if rows else {},
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        retired={cause: fields[f"retired_{cause}"] for cause in causes if f"retired_{cause}" in fields},
        retired_pending=bool(fields["retired_pending"]) if "retired_pending" in fields else None,
    )


def _read_slices(calls: Calls, handle: Any) -> list[tuple[MigSlice, Any]]:
    """The slices, with their handles. Indexes have holes where a slice was taken away."""
    found = []
    for index in range(calls("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        inner = calls("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, absent=ABSENT)
        if inner is None:
            continue
        attributes = calls("nvmlDeviceGetAttributes", inner)
        name = calls("nvmlDeviceGetName", inner) or ""
        one = MigSlice(
            uuid=calls("nvmlDeviceGetUUID", inner) or "",
            profile=name.rpartition("MIG ")[2],
            gpu_instance=calls("nvmlDeviceGetGpuInstanceId", inner),
            compute_instance=calls("nvmlDeviceGetComputeInstanceId", inner),
            memory=_read_memory(calls, inner),
            multiprocessors=attributes.multiprocessorCount if attributes is not None else None,
        )
        found.append((one, inner))
    return found


def _list_processes(calls: Calls, handle: Any, mig_uuid: str) -> list[GpuProcess]:
    """Compute, graphics and MPS processes; one that is in two lists is one process, with the larger memory."""
    memory: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        for process in calls.first((f"{name}_v3", handle), (f"{name}_v2", handle)) or ():
            held = [m for m in (process.usedGpuMemory, memory.get(process.pid)) if m is not None]
            memory[process.pid] = max(held, default=None)
    return [GpuProcess(pid, held, mig_uuid=mig_uuid) for pid, held in memory.items()]
