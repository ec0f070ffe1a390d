"""Turns what a scrape has found into Prometheus' metric families. Pure: no driver, no clock."""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric as Family

import sdp
from sdp.exporter.catalogue import CATALOGUE
from sdp.exporter.podresources import of_device
from sdp.exporter.readings import Allotment, Gpu, Identity, Memory, Owner, Snapshot

_ROWS = {row.name: row for row in CATALOGUE}

Value = float | None
Labels = dict[str, str]

GPU_VALUES: Mapping[str, Callable[[Gpu], Value]] = {
    "sdp_gpu_utilization_ratio": lambda g: g.utilization.gpu,
    "sdp_gpu_memory_utilization_ratio": lambda g: g.utilization.memory,
    "sdp_gpu_encoder_utilization_ratio": lambda g: g.utilization.encoder,
    "sdp_gpu_decoder_utilization_ratio": lambda g: g.utilization.decoder,
    "sdp_gpu_performance_state": lambda g: g.clocks.performance_state,
    "sdp_gpu_memory_total_bytes": lambda g: g.memory.total,
    "sdp_gpu_memory_used_bytes": lambda g: g.memory.used,
    "sdp_gpu_memory_free_bytes": lambda g: g.memory.free,
    "sdp_gpu_memory_reserved_bytes": lambda g: g.memory.reserved,
    "sdp_gpu_power_watts": lambda g: g.power.usage,
    "sdp_gpu_power_limit_watts": lambda g: g.power.limit,
    "sdp_gpu_energy_joules_total": lambda g: g.power.energy,
    "sdp_gpu_temperature_celsius": lambda g: g.thermal.gpu,
    "sdp_gpu_memory_temperature_celsius": lambda g: g.thermal.memory,
    "sdp_gpu_fan_speed_ratio": lambda g: g.thermal.fan,
    "sdp_gpu_pcie_transmit_bytes_per_second": lambda g: g.pcie.transmit,
    "sdp_gpu_pcie_receive_bytes_per_second": lambda g: g.pcie.receive,
    "sdp_gpu_pcie_replays_total": lambda g: g.pcie.replays,
    "sdp_gpu_pcie_link_generation": lambda g: g.pcie.generation,
    "sdp_gpu_pcie_link_generation_max": lambda g: g.pcie.generation_max,
    "sdp_gpu_pcie_link_width": lambda g: g.pcie.width,
    "sdp_gpu_pcie_link_width_max": lambda g: g.pcie.width_max,
    "sdp_gpu_nvlink_transmit_bytes_total": lambda g: g.nvlink.transmit,
    "sdp_gpu_nvlink_receive_bytes_total": lambda g: g.nvlink.receive,
    "sdp_gpu_nvlink_links": lambda g: g.nvlink.links,
    "sdp_gpu_nvlink_active_links": lambda g: g.nvlink.active,
    "sdp_gpu_row_remap_pending": lambda g: g.health.remap_pending,
    "sdp_gpu_row_remap_failed": lambda g: g.health.remap_failed,
    "sdp_gpu_retired_pages_pending": lambda g: g.health.retired_pending,
}
GPU_MAPPINGS: Mapping[str, tuple[str, Callable[[Gpu], Mapping[str, float]]]] = {
    "sdp_gpu_temperature_limit_celsius": ("limit", lambda g: g.thermal.limits),
    "sdp_gpu_clock_hertz": ("clock", lambda g: g.clocks.now),
    "sdp_gpu_clock_max_hertz": ("clock", lambda g: g.clocks.highest),
    "sdp_gpu_throttle_reason": ("reason", lambda g: g.clocks.reasons),
    "sdp_gpu_throttled_seconds_total": ("cause", lambda g: g.clocks.throttled),
    "sdp_gpu_nvlink_errors_total": ("kind", lambda g: g.nvlink.errors),
    "sdp_gpu_remapped_rows_total": ("cause", lambda g: g.health.remapped),
    "sdp_gpu_retired_pages_total": ("cause", lambda g: g.health.retired),
}
"""Metric -> its label, and the values by that label."""
MIG_MEMORY: Mapping[str, Callable[[Memory], Value]] = {
    "sdp_gpu_mig_memory_total_bytes": lambda m: m.total,
    "sdp_gpu_mig_memory_used_bytes": lambda m: m.used,
    "sdp_gpu_mig_memory_free_bytes": lambda m: m.free,
}


class Families:
    """Collects samples into families. Refuses what the catalogue does not have."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, labels: Labels, value: Value) -> None:
        """One sample; none where there is no value."""
        if value is None:
            return
        row = _ROWS[name]
        assert set(row.labels) == labels.keys(), f"{name}: labels {sorted(labels)}, and the catalogue has {row.labels}"
        if name not in self._families:
            plain = name.removesuffix("_total") if row.type == "counter" else name
            self._families[name] = Family(plain, row.help, row.type)
        self._families[name].add_sample(name, labels, float(value))

    def __iter__(self) -> Iterator[Family]:
        """In the catalogue's order."""
        return (self._families[name] for name in _ROWS if name in self._families)


def families(snapshot: Snapshot) -> Iterable[Family]:
    """All that a scrape exports, but for the exporter's own process."""
    found = Families()
    node = {"node": snapshot.node}
    for gpu in snapshot.gpus:
        labels = _labels(gpu.identity, node)
        found.add("sdp_gpu_up", labels, 1)
        _gpu(found, gpu, labels)
        _slices(found, gpu, labels)
        _pods(found, gpu, labels, snapshot.allotments)
        _processes(found, gpu, labels, snapshot.owners)
    for identity in snapshot.lost:
        found.add("sdp_gpu_up", _labels(identity, node), 0)
    for identity, age in snapshot.ages.items():
        found.add("sdp_gpu_reading_age_seconds", _labels(identity, node), age)
    _xids(found, snapshot, node)
    _exporter(found, snapshot, node)
    return found


def _labels(identity: Identity, node: Labels) -> Labels:
    return {"gpu": str(identity.index), "uuid": identity.uuid, "product": identity.product, **node}


def _gpu(found: Families, gpu: Gpu, labels: Labels) -> None:
    identity = gpu.identity
    minor = "" if identity.minor is None else str(identity.minor)
    info = {"pci_bus_id": identity.pci_bus_id, "minor": minor, "vbios": identity.vbios, "mig": str(int(gpu.mig))}
    found.add("sdp_gpu_info", labels | info, 1)
    for name, value in GPU_VALUES.items():
        found.add(name, labels, value(gpu))
    for name, (label, values) in GPU_MAPPINGS.items():
        for key, number in values(gpu).items():
            found.add(name, labels | {label: key}, number)
    for (kind, since), count in gpu.health.ecc.items():
        found.add("sdp_gpu_ecc_errors_total", labels | {"kind": kind, "since": since}, count)


def _slices(found: Families, gpu: Gpu, labels: Labels) -> None:
    for one in gpu.slices:
        instances = {"gpu_instance": one.gpu_instance, "compute_instance": one.compute_instance}
        own = labels | {name: "" if number is None else str(number) for name, number in instances.items()}
        own |= {"mig_uuid": one.uuid, "mig_profile": one.profile}
        found.add("sdp_gpu_mig_info", own, 1)
        found.add("sdp_gpu_mig_multiprocessors", own, one.multiprocessors)
        for name, value in MIG_MEMORY.items():
            found.add(name, own, value(one.memory))


def _pods(found: Families, gpu: Gpu, labels: Labels, allotments: Mapping[str, tuple[Allotment, ...]]) -> None:
    whole = of_device(allotments, uuid=gpu.identity.uuid, minor=gpu.identity.minor)
    parts = {"": whole, **{one.uuid: of_device(allotments, uuid=one.uuid) for one in gpu.slices}}
    for mig_uuid, containers in parts.items():
        for one in containers:
            own = {"mig_uuid": mig_uuid, "namespace": one.namespace, "pod": one.pod, "container": one.container}
            found.add("sdp_gpu_pod_info", labels | own, 1)


def _processes(found: Families, gpu: Gpu, labels: Labels, owners: Mapping[tuple[int, str, int], Owner]) -> None:
    for process in gpu.processes:
        owner = owners.get((gpu.identity.index, process.mig_uuid, process.pid), Owner())
        own = labels | {
            "mig_uuid": process.mig_uuid,
            "pid": str(process.pid),
            "container_pid": owner.container_pid,
            "process": owner.process,
            "namespace": owner.namespace,
            "pod": owner.pod,
            "pod_uid": owner.pod_uid,
            "container": owner.container,
            "container_id": owner.container_id,
            "ray_cluster": owner.ray_cluster,
            "ray_group": owner.ray_group,
        }
        found.add("sdp_gpu_process_memory_bytes", own, process.memory)
        found.add("sdp_gpu_process_sm_utilization_ratio", own, process.sm_utilization)


def _xids(found: Families, snapshot: Snapshot, node: Labels) -> None:
    """Of GPUs that answer and of those that do not: the XID may say why."""
    for identity in (*(gpu.identity for gpu in snapshot.gpus), *snapshot.lost):
        if (xids := snapshot.xids.get(identity.uuid)) is not None:
            labels = _labels(identity, node)
            found.add("sdp_gpu_xid_errors_total", labels, xids.total)
            for xid, at in xids.last.items():
                found.add("sdp_gpu_xid_timestamp_seconds", labels | {"xid": str(xid)}, at)


def _exporter(found: Families, snapshot: Snapshot, node: Labels) -> None:
    if (driver := snapshot.driver) is not None:
        versions = {"driver": driver.version, "nvml": driver.nvml, "cuda": driver.cuda}
        found.add("sdp_gpu_driver_info", node | versions, 1)
        found.add("sdp_exporter_gpus", node, driver.gpus)
    found.add("sdp_exporter_up", node, snapshot.up)
    found.add("sdp_exporter_reading_age_seconds", node, snapshot.age)
    found.add("sdp_exporter_read_seconds", node, snapshot.read_seconds)
    found.add("sdp_exporter_kubelet_up", node, snapshot.kubelet_up)
    for state, count in snapshot.process_states.items():
        found.add("sdp_exporter_processes", node | {"state": state}, count)
    for error, count in snapshot.errors.items():
        labels = node | {"gpu": error.gpu, "call": error.call, "error": error.error}
        found.add("sdp_exporter_errors_total", labels, count)
    versions = {"version": sdp.__version__, "python": platform.python_version()}
    found.add("sdp_exporter_build_info", node | versions, 1)
