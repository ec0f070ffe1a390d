"""What one scrape has found, as plain values in base units. None, or no entry, where the hardware does not tell."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that failed."""

    gpu: str
    """Index of the GPU; empty where the call is about none."""
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
    """What does not change of a GPU while the driver is loaded."""

    index: int
    uuid: str = ""
    product: str = ""
    pci_bus_id: str = ""
    minor: int | None = None
    vbios: str = ""


@dataclass(frozen=True, slots=True)
class Utilization:
    """Ratios."""

    gpu: float | None = None
    memory: float | None = None
    encoder: float | None = None
    decoder: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """Watts, and joules since the driver was loaded."""

    usage: float | None = None
    limit: float | None = None
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class Thermal:
    """Degrees Celsius; the fan's speed is a ratio."""

    gpu: float | None = None
    memory: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    fan: float | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Hertz by part; throttling by reason: now, and in seconds since the driver was loaded."""

    now: Mapping[str, float] = field(default_factory=dict)
    highest: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, bool] = field(default_factory=dict)
    throttled: Mapping[str, float] = field(default_factory=dict)
    performance_state: int | None = None


@dataclass(frozen=True, slots=True)
class Pcie:
    """Bytes per second over the last sample; generations and lanes."""

    transmit: float | None = None
    receive: float | None = None
    replays: int | None = None
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None


@dataclass(frozen=True, slots=True)
class Nvlink:
    """Bytes since the driver was loaded, over all links."""

    transmit: float | None = None
    receive: float | None = None
    links: int | None = None
    active: int | None = None
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    ecc: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, since) -> errors."""
    remapped: Mapping[str, int] = field(default_factory=dict)
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired: Mapping[str, float] = field(default_factory=dict)
    retired_pending: bool | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU, or on one of its slices."""

    pid: int
    memory: int | None = None
    sm_utilization: float | None = None
    mig_uuid: str = ""


@dataclass(frozen=True, slots=True)
class MigSlice:
    uuid: str
    profile: str
    gpu_instance: int | None
    compute_instance: int | None
    memory: Memory
    multiprocessors: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """All that a GPU has told."""

    identity: Identity
    utilization: Utilization
    memory: Memory
    power: Power
    thermal: Thermal
    clocks: Clocks
    pcie: Pcie
    nvlink: Nvlink
    health: Health
    mig: bool
    """Whether MIG is on."""
    slices: tuple[MigSlice, ...]
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True)
class Xids:
    """XID errors of a GPU since the exporter started."""

    total: int = 0
    last: Mapping[int, float] = field(default_factory=dict)
    """XID -> Unix time of the latest."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """A container that the kubelet has given a device to."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a process is, as far as that can be known."""

    container_pid: str = ""
    process: str = ""
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    container_id: str = ""
    ray_cluster: str = ""
    ray_group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One scrape."""

    node: str
    up: bool
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[Identity, ...] = ()
    """GPUs that are known, or counted by the driver, and did not answer."""
    ages: Mapping[Identity, float] = field(default_factory=dict)
    """Seconds since each GPU last answered."""
    age: float | None = None
    xids: Mapping[str, Xids] = field(default_factory=dict)
    """By UUID of the GPU; no entry where the driver does not report XIDs."""
    owners: Mapping[tuple[int, str, int], Owner] = field(default_factory=dict)
    """(index of the GPU, slice, pid) -> owner."""
    process_states: Mapping[str, int] = field(default_factory=dict)
    allotments: Mapping[str, tuple[Allotment, ...]] = field(default_factory=dict)
    """UUID of a GPU or slice -> containers."""
    kubelet_up: bool | None = None
    """None where it is not to be asked."""
    errors: Mapping[CallError, int] = field(default_factory=dict)
    read_seconds: float = 0.0
