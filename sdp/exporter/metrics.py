"""Prometheus' metric families from the result of a scrape. Pure: no driver, no clock."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from prometheus_client import Metric as Family

from sdp.exporter.catalogue import CATALOGUE
from sdp.exporter.nvml import CallError, Driver, GpuReading, Identity
from sdp.exporter.processes import PodOwner

_ROWS = {row.name: row for row in CATALOGUE}
MetricLabels = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The result of one scrape."""

    node: str
    up: bool
    driver: Driver | None = None
    gpus: tuple[GpuReading, ...] = ()
    lost: tuple[Identity, ...] = ()
    """GPUs that are known, or counted by the driver, but did not answer."""
    xids: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """UUID of a GPU -> XID -> Unix time of its latest report."""
    owners: Mapping[int, PodOwner | None] = field(default_factory=dict)
    """The owners of the processes on GPUs, by pid; None for a process that /proc does not show."""
    errors: Mapping[CallError, int] = field(default_factory=dict)
    read_seconds: float = 0.0


class Families:
    """Samples collected into families; a metric must be in the catalogue."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, labels: MetricLabels, value: float | None) -> None:
        """Add a sample, unless there is no value."""
        if value is None:
            return
        row = _ROWS[name]
        assert set(row.labels) == labels.keys(), f"{name}: labels {sorted(labels)}, and the catalogue has {row.labels}"
        if name not in self._families:
            self._families[name] = Family(name.removesuffix("_total"), row.help, row.type)
        self._families[name].add_sample(name, labels, float(value))

    def __iter__(self) -> Iterator[Family]:
        """Yield the families in the catalogue's order."""
        return (self._families[name] for name in _ROWS if name in self._families)


def families(snapshot: Snapshot) -> Iterable[Family]:
    """Return all metrics of a scrape except those of the exporter's own process."""
    result = Families()
    node = {"node": snapshot.node}
    for gpu in snapshot.gpus:
        _add_gpu(result, gpu, _labels(gpu.identity, node), snapshot)
    for identity in snapshot.lost:
        result.add("sdp_gpu_up", _labels(identity, node), 0)
    for identity in (*(gpu.identity for gpu in snapshot.gpus), *snapshot.lost):  # an XID may say why a GPU is lost
        for xid, at in snapshot.xids.get(identity.uuid, {}).items():
            result.add("sdp_gpu_xid_timestamp_seconds", _labels(identity, node) | {"xid": str(xid)}, at)
    _add_exporter(result, snapshot, node)
    return result


def _labels(identity: Identity, node: MetricLabels) -> MetricLabels:
    return {"gpu": str(identity.index), "uuid": identity.uuid, "product": identity.product, **node}


def _add_gpu(result: Families, gpu: GpuReading, labels: MetricLabels, snapshot: Snapshot) -> None:
    result.add("sdp_gpu_up", labels, 1)
    for name, own, value in gpu.samples:
        result.add(name, labels | own, value)
    for process in gpu.processes:
        owner = snapshot.owners.get(process.pid) or PodOwner()
        own = {"pid": str(process.pid), **asdict(owner)}
        result.add("sdp_gpu_process_memory_bytes", labels | own, process.memory)


def _add_exporter(result: Families, snapshot: Snapshot, node: MetricLabels) -> None:
    if (driver := snapshot.driver) is not None:
        result.add("sdp_gpu_driver_info", node | {"driver": driver.version, "cuda": driver.cuda}, 1)
    result.add("sdp_exporter_up", node, snapshot.up)
    result.add("sdp_exporter_read_seconds", node, snapshot.read_seconds)
    unknown = sum(owner is None for owner in snapshot.owners.values())
    result.add("sdp_exporter_processes", node | {"state": "known"}, len(snapshot.owners) - unknown)
    result.add("sdp_exporter_processes", node | {"state": "unknown"}, unknown)
    for error, count in snapshot.errors.items():
        labels = node | {"gpu": error.gpu, "call": error.call, "error": error.error}
        result.add("sdp_exporter_errors_total", labels, count)
