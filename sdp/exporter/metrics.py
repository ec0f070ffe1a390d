"""Prometheus' metric families from the result of a scrape. Pure: no driver, no clock."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from prometheus_client import Metric as Family

from sdp.exporter.catalogue import CATALOGUE
from sdp.exporter.nvml import CallError, Driver, GpuReading, Identity
from sdp.exporter.processes import PodOwner

_LABELS = {row.name: row.labels for row in CATALOGUE}
MetricLabels = dict[str, str]
Samples = Iterator[tuple[str, MetricLabels, float | None]]
"""Samples: a metric, its labels, and its value if it has one."""


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


def families(snapshot: Snapshot) -> list[Family]:
    """Return all metrics of a scrape except those of the exporter's own process."""
    return grouped(_samples(snapshot))


def grouped(samples: Samples) -> list[Family]:
    """Return the samples that have a value in families, in the order of the catalogue, which has their metrics."""
    result = {row.name: Family(row.name.removesuffix("_total"), row.help, row.type) for row in CATALOGUE}
    for name, labels, value in samples:
        assert set(_LABELS[name]) == labels.keys(), f"{name}: labels {sorted(labels)}, not {_LABELS[name]}"
        if value is not None:
            result[name].add_sample(name, labels, float(value))
    return [family for family in result.values() if family.samples]


def _samples(snapshot: Snapshot) -> Samples:
    node = {"node": snapshot.node}
    for gpu in snapshot.gpus:
        yield from _of_gpu(gpu, _labels(gpu.identity, node), snapshot)
    for identity in snapshot.lost:
        yield "sdp_gpu_up", _labels(identity, node), 0
    for identity in (*(gpu.identity for gpu in snapshot.gpus), *snapshot.lost):  # an XID may say why a GPU is lost
        for xid, at in snapshot.xids.get(identity.uuid, {}).items():
            yield "sdp_gpu_xid_timestamp_seconds", _labels(identity, node) | {"xid": str(xid)}, at
    if (driver := snapshot.driver) is not None:
        yield "sdp_gpu_driver_info", node | {"driver": driver.version, "cuda": driver.cuda}, 1
    yield "sdp_exporter_up", node, snapshot.up
    yield "sdp_exporter_read_seconds", node, snapshot.read_seconds
    unknown = sum(owner is None for owner in snapshot.owners.values())
    yield "sdp_exporter_processes", node | {"state": "known"}, len(snapshot.owners) - unknown
    yield "sdp_exporter_processes", node | {"state": "unknown"}, unknown
    for error, count in snapshot.errors.items():
        yield "sdp_exporter_errors_total", node | {"gpu": error.gpu, "call": error.call, "error": error.error}, count


def _labels(identity: Identity, node: MetricLabels) -> MetricLabels:
    return {"gpu": str(identity.index), "uuid": identity.uuid, "product": identity.product, **node}


def _of_gpu(gpu: GpuReading, labels: MetricLabels, snapshot: Snapshot) -> Samples:
    yield "sdp_gpu_up", labels, 1
    yield from ((name, labels | own, value) for name, own, value in gpu.samples)
    for pid, memory in gpu.processes.items():
        owner = snapshot.owners.get(pid) or PodOwner()
        yield "sdp_gpu_process_memory_bytes", labels | {"pid": str(pid), **asdict(owner)}, memory
