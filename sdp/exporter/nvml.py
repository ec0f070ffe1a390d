"""Readers of NVML, the driver's library, through nvidia-ml-py: one for the driver as a whole, one for each GPU.

A call that the hardware or the driver does not support returns None. A failed call returns None, too, and is reported.
Calls may hang for any time, so each reader runs in its own thread (reader_thread.py).
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

Sample = tuple[str, dict[str, str], float]
"""A metric of the catalogue, its labels beyond those that all metrics of the GPU have, and its value."""
Convert = Callable[[Any], float]


def _codes(*names: str) -> frozenset[int]:
    return frozenset(getattr(pynvml, f"NVML_ERROR_{name}") for name in names)


def _constants(prefix: str, **names: str) -> dict[str, int]:
    """Return NVML's constants by the value of a label."""
    return {label: getattr(pynvml, prefix + name) for label, name in names.items()}


UNSUPPORTED = _codes("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")
"""Errors of an older driver or a smaller GPU, which are not faults."""
GONE = _codes(
    *("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"),
    *("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"),
)
"""After one of these, further calls about the same GPU are useless."""
ABSENT = _codes("NOT_FOUND")
_FIELD_ABSENT = UNSUPPORTED | ABSENT | _codes("INVALID_ARGUMENT", "NO_DATA")
"""Errors of fields that this driver does not know; it reports some as invalid arguments."""
_ERROR_NAMES: Mapping[int, str] = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}
_UNION_MEMBER = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_ALL_LINKS = 0xFFFFFFFF
PCIE_COUNTERS = _constants("NVML_PCIE_UTIL_", transmit="TX_BYTES", receive="RX_BYTES")


def percent(value: float) -> float:
    return value / 100


def milli(value: float) -> float:
    return value / 1000


def kilo(value: float) -> float:
    return value * 1000


def mega(value: float) -> float:
    return value * 1e6


def kibi(value: float) -> float:
    return value * 1024


def violated_s(status: Any) -> float:
    return float(status.violationTime) / 1e9


NUMBERS: tuple[tuple[str, Convert, str], ...] = (
    ("sdp_gpu_power_watts", milli, "nvmlDeviceGetPowerUsage"),
    ("sdp_gpu_power_limit_watts", milli, "nvmlDeviceGetEnforcedPowerLimit"),
    ("sdp_gpu_energy_joules_total", milli, "nvmlDeviceGetTotalEnergyConsumption"),
    ("sdp_gpu_pcie_replays_total", float, "nvmlDeviceGetPcieReplayCounter"),
    ("sdp_gpu_pcie_link_width", float, "nvmlDeviceGetCurrPcieLinkWidth"),
    ("sdp_gpu_pcie_link_width_max", float, "nvmlDeviceGetMaxPcieLinkWidth"),
)
"""Metrics of one call each: (metric, conversion, call)."""
CLOCKS = _constants("NVML_CLOCK_", graphics="GRAPHICS", sm="SM", memory="MEM", video="VIDEO")
TEMPERATURE_LIMITS = _constants(
    "NVML_TEMPERATURE_THRESHOLD_", shutdown="SHUTDOWN", slowdown="SLOWDOWN", memory_max="MEM_MAX", gpu_max="GPU_MAX"
)
THROTTLE_CAUSES = {
    cause: getattr(pynvml, f"NVML_PERF_POLICY_{cause.upper()}")
    for cause in ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
}
BY_LABEL: tuple[tuple[str, str, Convert, str, Mapping[str, int]], ...] = (
    ("sdp_gpu_clock_hertz", "clock", mega, "nvmlDeviceGetClockInfo", CLOCKS),
    ("sdp_gpu_clock_max_hertz", "clock", mega, "nvmlDeviceGetMaxClockInfo", CLOCKS),
    ("sdp_gpu_temperature_limit_celsius", "limit", float, "nvmlDeviceGetTemperatureThreshold", TEMPERATURE_LIMITS),
    ("sdp_gpu_throttled_seconds_total", "cause", violated_s, "nvmlDeviceGetViolationStatus", THROTTLE_CAUSES),
)
"""Metrics of one call for each value of a label: (metric, label, conversion, call, argument by value)."""
FIELDS: Mapping[str, tuple[str, int, str, dict[str, str], Convert]] = {
    "memory_temperature": ("MEMORY_TEMP", 0, "sdp_gpu_memory_temperature_celsius", {}, float),
    "nvlink_transmit": ("NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS, "sdp_gpu_nvlink_transmit_bytes_total", {}, kibi),
    "nvlink_receive": ("NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS, "sdp_gpu_nvlink_receive_bytes_total", {}, kibi),
    "nvlink_links": ("NVLINK_LINK_COUNT", 0, "sdp_gpu_nvlink_links", {}, float),
    **{
        f"nvlink_{kind}": (
            *(f"NVLINK_{kind.upper()}_ERROR_COUNT_TOTAL", 0),
            *("sdp_gpu_nvlink_errors_total", {"kind": kind}, float),
        )
        for kind in ("crc_flit", "crc_data", "replay", "recovery")
    },
    "retired_corrected": ("RETIRED_SBE", 0, "sdp_gpu_retired_pages_total", {"cause": "corrected"}, float),
    "retired_uncorrected": ("RETIRED_DBE", 0, "sdp_gpu_retired_pages_total", {"cause": "uncorrected"}, float),
    "retired_pending": ("RETIRED_PENDING", 0, "sdp_gpu_retired_pages_pending", {}, bool),
}
"""Values that NVML returns by field number in one call: (NVML_FI_DEV_ field, scope, metric, labels, conversion)."""
THROTTLE_REASONS = {
    reason: getattr(pynvml, f"nvmlClocksThrottleReason{reason.title().replace('_', '')}")
    for reason in (
        *("gpu_idle", "applications_clocks_setting", "display_clock_setting", "sync_boost", "sw_power_cap"),
        *("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    )
}
ECC_KINDS = _constants("NVML_MEMORY_ERROR_TYPE_", corrected="CORRECTED", uncorrected="UNCORRECTED")
ECC_SINCE = _constants("NVML_", driver_load="VOLATILE_ECC", lifetime="AGGREGATE_ECC")


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
    nvml: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties of a GPU that do not change while the driver is loaded."""

    index: int
    uuid: str = ""
    product: str = ""
    pci_bus_id: str = ""
    minor: int | None = None
    vbios: str = ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU, or on one of its slices."""

    pid: int
    memory: int | None = None
    mig_uuid: str = ""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of a GPU. A value that the hardware does not report has no sample."""

    identity: Identity
    samples: tuple[Sample, ...] = ()
    mig: bool = False
    """True if MIG is enabled."""
    slices: tuple[str, ...] = ()
    """UUIDs of the MIG slices."""
    processes: tuple[GpuProcess, ...] = ()


class Gone(Exception):
    """The GPU or the driver will answer no further calls of this reading."""


Report = Callable[[CallError], None]


class Calls:
    """Calls to NVML, whose errors are reported."""

    def __init__(self, report: Report, gpu: str = "") -> None:
        self.current = ""
        """The call under way, or the last one; it names a call that hangs."""
        self.gpu, self._report = gpu, report

    def __call__(
        self, function: str, *arguments: Any, absent: frozenset[int] = frozenset(), required: bool = False
    ) -> Any:
        """Return the result; None if it is unsupported, absent or failed.

        Raise Gone if the GPU or the driver is lost, or if the call is required and has no result.
        """
        self.current = function
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            code = int(error.value)
            if not required and code in UNSUPPORTED | absent:
                return None
            self.failed(function, code)
            if required or code in GONE:
                raise Gone from error
            return None

    def first(self, functions: Sequence[str], *arguments: Any) -> Any:
        """Return the result of the first call that has one; list the newest call first, then those of older drivers."""
        results = (self(function, *arguments) for function in functions)
        return next((result for result in results if result is not None), None)

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
            cuda = calls("nvmlSystemGetCudaDriverVersion_v2")
            return Driver(
                gpus=count,
                version=calls("nvmlSystemGetDriverVersion") or "",
                nvml=calls("nvmlSystemGetNVMLVersion") or "",
                cuda="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            )
        except Gone:
            # Not closed, since another thread may be in a call; a second init of an open library is harmless.
            self._open = False
            return None


class GpuReader:
    """Reads one GPU. Not thread-safe."""

    def __init__(self, index: int, report: Report) -> None:
        self._index = index
        self.calls = Calls(report, str(index))

    def read(self) -> GpuReading | None:
        """Read the GPU; None if it does not answer."""
        try:
            return self._read(self.calls("nvmlDeviceGetHandleByIndex", self._index, required=True))
        except Gone:
            return None

    def _read(self, handle: Any) -> GpuReading:
        calls = self.calls
        identity = self._identity(handle)
        mode = calls("nvmlDeviceGetMigMode", handle)
        mig = bool(mode and mode[0])
        samples = [*_read_samples(calls, handle)]
        slices: dict[str, Any] = {}
        if mig:
            for uuid, inner, own in _read_slices(calls, handle):
                slices[uuid] = inner
                samples += own
        processes = self._read_processes(handle, slices)
        return GpuReading(identity, tuple(samples), mig, tuple(slices), processes)

    def _identity(self, handle: Any) -> Identity:
        calls = self.calls
        pci = calls("nvmlDeviceGetPciInfo", handle)
        return Identity(
            index=self._index,
            uuid=calls("nvmlDeviceGetUUID", handle) or "",
            product=calls("nvmlDeviceGetName", handle) or "",
            pci_bus_id=str(pci.busId) if pci is not None else "",
            minor=calls("nvmlDeviceGetMinorNumber", handle),
            vbios=calls("nvmlDeviceGetVbiosVersion", handle) or "",
        )

    def _read_processes(self, handle: Any, slices: Mapping[str, Any]) -> tuple[GpuProcess, ...]:
        """Read the processes; with MIG, those of the slices, which the whole GPU would list again."""
        if slices:
            return tuple(p for uuid, inner in slices.items() for p in _list_processes(self.calls, inner, uuid))
        return tuple(_list_processes(self.calls, handle, ""))


def address_of(handle: Any) -> int:
    """Return a handle's address: two handles of one GPU are the same pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _sample(name: str, value: Any, convert: Convert = float, **labels: str) -> list[Sample]:
    return [] if value is None else [(name, labels, convert(value))]


def _read_samples(calls: Calls, handle: Any) -> Iterator[Sample]:
    """Yield all values of a GPU except those of its slices and processes."""
    for name, convert, function in NUMBERS:
        yield from _sample(name, calls(function, handle), convert)
    for name, label, convert, function, arguments in BY_LABEL:
        for key, argument in arguments.items():
            yield from _sample(name, calls(function, handle, argument), convert, **{label: key})
    for direction, counter in PCIE_COUNTERS.items():
        kilobytes = calls("nvmlDeviceGetPcieThroughput", handle, counter)
        yield from _sample(f"sdp_gpu_pcie_{direction}_bytes_per_second", kilobytes, kilo)
    yield from _read_fields(calls, handle)
    yield from _read_memory(calls, handle, "sdp_gpu_memory")
    if (rates := calls("nvmlDeviceGetUtilizationRates", handle)) is not None:
        yield "sdp_gpu_utilization_ratio", {}, percent(rates.gpu)
        yield "sdp_gpu_memory_utilization_ratio", {}, percent(rates.memory)
    temperatures = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    temperature = calls.first(temperatures, handle, pynvml.NVML_TEMPERATURE_GPU)
    yield from _sample("sdp_gpu_temperature_celsius", temperature)
    reasons = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    if (bits := calls.first(reasons, handle)) is not None:
        for reason, bit in THROTTLE_REASONS.items():
            yield "sdp_gpu_throttle_reason", {"reason": reason}, bool(bits & bit)
    for kind, number in ECC_KINDS.items():
        for since, counter in ECC_SINCE.items():
            errors = calls("nvmlDeviceGetTotalEccErrors", handle, number, counter)
            yield from _sample("sdp_gpu_ecc_errors_total", errors, kind=kind, since=since)
    if rows := calls("nvmlDeviceGetRemappedRows", handle):
        yield "sdp_gpu_remapped_rows_total", {"cause": "corrected"}, rows[0]
        yield "sdp_gpu_remapped_rows_total", {"cause": "uncorrected"}, rows[1]
        yield "sdp_gpu_row_remap_pending", {}, bool(rows[2])
        yield "sdp_gpu_row_remap_failed", {}, bool(rows[3])


def _read_fields(calls: Calls, handle: Any) -> Iterator[Sample]:
    numbers = [(getattr(pynvml, f"NVML_FI_DEV_{field}"), scope) for field, scope, *_ in FIELDS.values()]
    values = calls("nvmlDeviceGetFieldValues", handle, numbers)
    for (name, (_, _, metric, labels, convert)), value in zip(FIELDS.items(), values or (), strict=False):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            number = getattr(value.value, _UNION_MEMBER.get(value.valueType, "ullVal"))
            yield metric, labels, convert(number)
            if name == "nvlink_links":
                states = [calls("nvmlDeviceGetNvLinkState", handle, link) for link in range(int(number))]
                if any(state is not None for state in states):
                    yield "sdp_gpu_nvlink_active_links", {}, sum(map(bool, states))
        elif value.nvmlReturn not in _FIELD_ABSENT:
            calls.failed(f"nvmlDeviceGetFieldValues:{name}", int(value.nvmlReturn))


def _read_memory(calls: Calls, handle: Any, prefix: str, **labels: str) -> Iterator[Sample]:
    """Yield memory samples; the newer call counts the driver's reserve separately, the older one as used."""
    parts = ["total", "used", "free"]
    memory = calls("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    if memory is None:
        memory = calls("nvmlDeviceGetMemoryInfo", handle)
    elif not labels:
        parts.append("reserved")
    for part in parts if memory is not None else ():
        yield f"{prefix}_{part}_bytes", labels, getattr(memory, part)


def _read_slices(calls: Calls, handle: Any) -> Iterator[tuple[str, Any, list[Sample]]]:
    """Yield UUID, handle and samples of each slice; indexes of removed slices are missing."""
    for index in range(calls("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        inner = calls("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, absent=ABSENT)
        if inner is None:
            continue
        attributes = calls("nvmlDeviceGetAttributes", inner)
        name = calls("nvmlDeviceGetName", inner) or ""
        instances = [calls(f"nvmlDeviceGet{kind}InstanceId", inner) for kind in ("Gpu", "Compute")]
        gpu_instance, compute_instance = ("" if number is None else str(number) for number in instances)
        labels: dict[str, str] = {
            "mig_uuid": calls("nvmlDeviceGetUUID", inner) or "",
            "mig_profile": name.rpartition("MIG ")[2],
            "gpu_instance": gpu_instance,
            "compute_instance": compute_instance,
        }
        samples = [("sdp_gpu_mig_info", labels, 1.0)]
        if attributes is not None:
            samples.append(("sdp_gpu_mig_multiprocessors", labels, attributes.multiprocessorCount))
        samples += _read_memory(calls, inner, "sdp_gpu_mig_memory", **labels)
        yield labels["mig_uuid"], inner, samples


def _list_processes(calls: Calls, handle: Any, mig_uuid: str) -> list[GpuProcess]:
    """Return compute, graphics and MPS processes; one in two lists is one process, with the larger memory."""
    memory: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        for process in calls.first((f"{name}_v3", f"{name}_v2"), handle) or ():
            used = [m for m in (process.usedGpuMemory, memory.get(process.pid)) if m is not None]
            memory[process.pid] = max(used, default=None)
    return [GpuProcess(pid, used, mig_uuid=mig_uuid) for pid, used in memory.items()]
