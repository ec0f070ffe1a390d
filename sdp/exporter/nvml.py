"""Readers of NVML, the driver's library, through nvidia-ml-py: one for the driver as a whole, one for each GPU.

A call that the hardware or the driver does not support returns None. A failed call returns None, too, and is reported.
Calls may hang for any time, so each reader runs in its own thread (reader_thread.py).
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

Sample = tuple[str, dict[str, str], float]
"""A metric of the catalogue, its labels beyond those that all metrics of the GPU have, and its value."""


def _codes(*names: str) -> frozenset[int]:
    return frozenset(getattr(pynvml, f"NVML_ERROR_{name}") for name in names)


UNSUPPORTED = _codes("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")
"""Errors of an older driver or a smaller GPU, which are not faults."""
GONE = _codes(
    *("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"),
    *("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"),
)
"""After one of these, further calls about the same GPU are useless."""
_FIELD_ABSENT = UNSUPPORTED | _codes("NOT_FOUND", "INVALID_ARGUMENT", "NO_DATA")
"""Errors of fields that this driver does not know; it reports some as invalid arguments."""
_ERROR_NAMES: Mapping[int, str] = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}
_UNION_MEMBER = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_ALL_LINKS = 0xFFFFFFFF
_SLOWDOWN = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_CORRECTED, _UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_SINCE_LOAD = pynvml.NVML_VOLATILE_ECC
LINKS = "NVLINK_LINK_COUNT"
CENTI, MILLI = Fraction(1, 100), Fraction(1, 1000)
KIBI, KILO, MEGA = 1024, 1000, 10**6
Factor = Fraction | int
"""The factor from NVML's unit to the base unit; a fraction rounds once."""


Reading = tuple[str, dict[str, str], Factor, str, tuple[int, ...]]
"""A value of one call: (metric, labels, factor, call, arguments)."""


def _of(metric: str, factor: Factor, call: str, *arguments: int, **labels: str) -> Reading:
    return metric, labels, factor, call, arguments


READINGS = (
    _of("sdp_gpu_power_watts", MILLI, "nvmlDeviceGetPowerUsage"),
    _of("sdp_gpu_power_limit_watts", MILLI, "nvmlDeviceGetEnforcedPowerLimit"),
    _of("sdp_gpu_energy_joules_total", MILLI, "nvmlDeviceGetTotalEnergyConsumption"),
    _of("sdp_gpu_temperature_celsius", 1, "nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
    _of("sdp_gpu_temperature_limit_celsius", 1, "nvmlDeviceGetTemperatureThreshold", _SLOWDOWN, limit="slowdown"),
    _of("sdp_gpu_clock_hertz", MEGA, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM, clock="sm"),
    _of("sdp_gpu_clock_hertz", MEGA, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM, clock="memory"),
    _of("sdp_gpu_clock_max_hertz", MEGA, "nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM, clock="sm"),
    _of("sdp_gpu_pcie_transmit_bytes_per_second", KILO, "nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES),
    _of("sdp_gpu_pcie_receive_bytes_per_second", KILO, "nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES),
    _of("sdp_gpu_pcie_replays_total", 1, "nvmlDeviceGetPcieReplayCounter"),
    _of("sdp_gpu_pcie_link_width", 1, "nvmlDeviceGetCurrPcieLinkWidth"),
    _of("sdp_gpu_pcie_link_width_max", 1, "nvmlDeviceGetMaxPcieLinkWidth"),
    _of("sdp_gpu_ecc_errors_total", 1, "nvmlDeviceGetTotalEccErrors", _CORRECTED, _SINCE_LOAD, kind="corrected"),
    _of("sdp_gpu_ecc_errors_total", 1, "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD, kind="uncorrected"),
)
FIELDS = (
    _of("sdp_gpu_memory_temperature_celsius", 1, "MEMORY_TEMP"),
    _of("sdp_gpu_nvlink_transmit_bytes_total", KIBI, "NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS),
    _of("sdp_gpu_nvlink_receive_bytes_total", KIBI, "NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS),
    _of("sdp_gpu_nvlink_links", 1, LINKS),
    _of("sdp_gpu_nvlink_errors_total", 1, "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", kind="crc_flit"),
    _of("sdp_gpu_nvlink_errors_total", 1, "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", kind="crc_data"),
    _of("sdp_gpu_nvlink_errors_total", 1, "NVLINK_REPLAY_ERROR_COUNT_TOTAL", kind="replay"),
    _of("sdp_gpu_nvlink_errors_total", 1, "NVLINK_RECOVERY_ERROR_COUNT_TOTAL", kind="recovery"),
)
"""Values that NVML returns in one call, named as in NVML_FI_DEV_…, each with the field's scope."""
ACTIVITY = {"sdp_gpu_sm_occupancy_ratio": "SM_OCCUPANCY", "sdp_gpu_tensor_activity_ratio": "ANY_TENSOR_UTIL"}
"""Percentages that a GPU counts itself, from Hopper on, named as in NVML_GPM_METRIC_…."""
THROTTLE_REASONS = {
    reason: getattr(pynvml, f"nvmlClocksThrottleReason{reason.title().replace('_', '')}")
    for reason in (
        *("gpu_idle", "applications_clocks_setting", "display_clock_setting", "sync_boost", "sw_power_cap"),
        *("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    )
}


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that failed."""

    gpu: str
    """Index of the GPU; empty if the call is about none."""
    call: str
    error: str


@dataclass(frozen=True, slots=True)
class Driver:
    gpus: int
    version: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties of a GPU that do not change while the driver is loaded."""

    index: int
    uuid: str = ""
    product: str = ""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of a GPU. A value that the hardware does not report has no sample."""

    identity: Identity
    samples: tuple[Sample, ...] = ()
    processes: Mapping[int, int | None] = field(default_factory=dict)
    """The memory of each process on the GPU, if known, by pid."""


class Gone(Exception):
    """The GPU or the driver will answer no further calls of this reading."""


Report = Callable[[CallError], None]


class Calls:
    """Calls to NVML, whose errors are reported."""

    def __init__(self, report: Report, gpu: str = "") -> None:
        self.current = ""
        """The call under way, or the last one; it names a call that hangs."""
        self.gpu, self._report = gpu, report

    def __call__(self, function: str, *arguments: Any, required: bool = False) -> Any:
        """Return the result; None if it is unsupported or failed.

        Raise Gone if the GPU or the driver is lost, or if the call is required and has no result.
        """
        self.current = function
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            code = int(error.value)
            if not required and code in UNSUPPORTED:
                return None
            self.failed(function, code)
            if required or code in GONE:
                raise Gone from error
            return None

    def failed(self, call: str, code: int) -> None:
        self._report(CallError(self.gpu, call, _ERROR_NAMES.get(code, f"code_{code}")))


class DriverReader:
    """Opens the library, retrying at each reading, and counts the GPUs."""

    def __init__(self, report: Report) -> None:
        self._open = False
        self.calls = Calls(report)

    def read(self) -> Driver | None:
        """Read the driver; None if it does not answer."""
        calls = self.calls
        try:
            if not self._open:
                calls("nvmlInit", required=True)
                self._open = True
            count = calls("nvmlDeviceGetCount", required=True)
            number, version = calls("nvmlSystemGetCudaDriverVersion_v2"), calls("nvmlSystemGetDriverVersion")
            cuda = "" if number is None else f"{number // 1000}.{number % 1000 // 10}"
            return Driver(count, version or "", cuda)
        except Gone:
            # Another thread may be in a call, so NVML stays open; a second init is harmless.
            self._open = False
            return None


class GpuReader:
    """Reads one GPU. Not thread-safe."""

    def __init__(self, index: int, report: Report) -> None:
        self._index = index
        self._counted: Any = None
        """The GPU's counters at the previous reading."""
        self.calls = Calls(report, str(index))

    def read(self) -> GpuReading | None:
        """Read the GPU; None if it does not answer."""
        try:
            return self._read(self.calls("nvmlDeviceGetHandleByIndex", self._index, required=True))
        except Gone:
            return None

    def _read(self, handle: Any) -> GpuReading:
        calls = self.calls
        uuid, product = calls("nvmlDeviceGetUUID", handle), calls("nvmlDeviceGetName", handle)
        identity = Identity(self._index, uuid or "", product or "")
        samples = *_read_samples(calls, handle), *self._read_activity(handle)
        return GpuReading(identity, samples, _list_processes(calls, handle))

    def _read_activity(self, handle: Any) -> Iterator[Sample]:
        """Yield the mean activity since the previous reading."""
        calls, before = self.calls, self._counted
        support = calls("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            return
        self._counted = calls("nvmlGpmSampleAlloc")
        if self._counted is not None and calls("nvmlGpmSampleGet", handle, self._counted) is None:
            calls("nvmlGpmSampleFree", self._counted)
            self._counted = None
        if before is not None and self._counted is not None:
            asked = pynvml.c_nvmlGpmMetricsGet_t(numMetrics=len(ACTIVITY), sample1=before, sample2=self._counted)
            asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            for place, name in enumerate(ACTIVITY.values()):
                asked.metrics[place].metricId = getattr(pynvml, f"NVML_GPM_METRIC_{name}")
            answer = calls("nvmlGpmMetricsGet", asked)
            for place, (metric, name) in enumerate(ACTIVITY.items() if answer is not None else ()):
                value = answer.metrics[place]
                if value.nvmlReturn == pynvml.NVML_SUCCESS:
                    yield metric, {}, value.value / 100
                elif value.nvmlReturn not in _FIELD_ABSENT:
                    calls.failed(f"nvmlGpmMetricsGet:{name}", int(value.nvmlReturn))
        if before is not None:
            calls("nvmlGpmSampleFree", before)


def address_of(handle: Any) -> int:
    """Return a handle's address: two handles of one GPU are the same pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _read_samples(calls: Calls, handle: Any) -> Iterator[Sample]:
    """Yield all values of a GPU except those of its processes."""
    for metric, labels, factor, call, arguments in READINGS:
        if (value := calls(call, handle, *arguments)) is not None:
            yield metric, labels, float(value * factor)
    yield from _read_fields(calls, handle)
    yield from _read_memory(calls, handle)
    if (rates := calls("nvmlDeviceGetUtilizationRates", handle)) is not None:
        yield "sdp_gpu_utilization_ratio", {}, float(rates.gpu * CENTI)
        yield "sdp_gpu_memory_utilization_ratio", {}, float(rates.memory * CENTI)
    if (bits := calls("nvmlDeviceGetCurrentClocksThrottleReasons", handle)) is not None:
        for reason, bit in THROTTLE_REASONS.items():
            yield "sdp_gpu_throttle_reason", {"reason": reason}, bool(bits & bit)
    if rows := calls("nvmlDeviceGetRemappedRows", handle):
        yield "sdp_gpu_remapped_rows_total", {"cause": "corrected"}, rows[0]
        yield "sdp_gpu_remapped_rows_total", {"cause": "uncorrected"}, rows[1]
        yield "sdp_gpu_row_remap_pending", {}, bool(rows[2])
        yield "sdp_gpu_row_remap_failed", {}, bool(rows[3])


def _read_fields(calls: Calls, handle: Any) -> Iterator[Sample]:
    numbers = [(getattr(pynvml, f"NVML_FI_DEV_{call}"), sum(scope)) for *_, call, scope in FIELDS]
    values = calls("nvmlDeviceGetFieldValues", handle, numbers)
    for (metric, labels, factor, call, _), value in zip(FIELDS, values or (), strict=False):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            number = getattr(value.value, _UNION_MEMBER.get(value.valueType, "ullVal"))
            yield metric, labels, float(number * factor)
            if call == LINKS:
                states = [calls("nvmlDeviceGetNvLinkState", handle, link) for link in range(int(number))]
                if any(state is not None for state in states):
                    yield "sdp_gpu_nvlink_active_links", {}, sum(map(bool, states))
        elif value.nvmlReturn not in _FIELD_ABSENT:
            calls.failed(f"nvmlDeviceGetFieldValues:{call}", int(value.nvmlReturn))


def _read_memory(calls: Calls, handle: Any) -> Iterator[Sample]:
    """Yield memory samples; what the driver keeps for itself is neither used nor free."""
    memory = calls("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    if memory is not None:
        for part in ("total", "used", "free"):
            yield f"sdp_gpu_memory_{part}_bytes", {}, getattr(memory, part)


def _list_processes(calls: Calls, handle: Any) -> dict[int, int | None]:
    """Return the memory of compute, graphics and MPS processes by pid; of a process in two lists, the larger one."""
    memory: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        for process in calls(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle) or ():
            used = [m for m in (process.usedGpuMemory, memory.get(process.pid)) if m is not None]
            memory[process.pid] = max(used, default=None)
    return memory
