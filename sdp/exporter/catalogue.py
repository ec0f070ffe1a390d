"""Every metric that the exporter exports."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from sdp.exporter.processes import PodOwner


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    name: str
    labels: tuple[str, ...]
    help: str

    @property
    def type(self) -> Literal["gauge", "counter"]:
        return "counter" if self.name.endswith("_total") else "gauge"


NODE = ("node",)
GPU = ("gpu", "uuid", "product", "node")
"""Labels of every metric of a GPU: its index on the node, its UUID, its product name, and the node."""
PROCESS = (*GPU, "pid", *(field.name for field in fields(PodOwner)))
"""`pid` is the host's."""

HELP: Mapping[tuple[str, ...], Mapping[str, str]] = {
    GPU: {
        "sdp_gpu_up": "1 if the GPU answered this scrape, 0 if it is known but did not.",
        "sdp_gpu_utilization_ratio": "Share of the driver's last sampling period in which any kernel ran.",
        "sdp_gpu_memory_utilization_ratio": "Share of that period in which memory was read or written.",
        "sdp_gpu_sm_occupancy_ratio": "Warps since the last scrape, as a share of those that the GPU has room for.",
        "sdp_gpu_tensor_activity_ratio": "Share of the time since the last scrape in which tensor cores worked.",
        "sdp_gpu_memory_total_bytes": "Memory of the GPU.",
        "sdp_gpu_memory_used_bytes": "Memory that processes hold.",
        "sdp_gpu_memory_free_bytes": "Memory that is free.",
        "sdp_gpu_power_watts": "Power drawn by the whole board.",
        "sdp_gpu_power_limit_watts": "The power limit in force.",
        "sdp_gpu_energy_joules_total": "Energy used since the driver was loaded.",
        "sdp_gpu_temperature_celsius": "Temperature of the GPU's die.",
        "sdp_gpu_memory_temperature_celsius": "Temperature of the GPU's memory.",
        "sdp_gpu_pcie_transmit_bytes_per_second": "PCIe throughput from the GPU, over 20 ms.",
        "sdp_gpu_pcie_receive_bytes_per_second": "PCIe throughput to the GPU, over 20 ms.",
        "sdp_gpu_pcie_replays_total": "Packets that PCIe had to send again.",
        "sdp_gpu_pcie_link_width": "PCIe lanes in use.",
        "sdp_gpu_pcie_link_width_max": "PCIe lanes of GPU and slot.",
        "sdp_gpu_nvlink_transmit_bytes_total": "Data sent over all NVLinks, without overhead.",
        "sdp_gpu_nvlink_receive_bytes_total": "Data received over all NVLinks, without overhead.",
        "sdp_gpu_nvlink_links": "NVLinks of the GPU.",
        "sdp_gpu_nvlink_active_links": "NVLinks that are up.",
        "sdp_gpu_row_remap_pending": "1 if a memory row is replaced at the next reset.",
        "sdp_gpu_row_remap_failed": "1 if a memory row could not be replaced: exchange the board.",
    },
    (*GPU, "limit"): {"sdp_gpu_temperature_limit_celsius": "Temperature at which the GPU slows down."},
    (*GPU, "clock"): {
        "sdp_gpu_clock_hertz": "Current clock of a part of the GPU.",
        "sdp_gpu_clock_max_hertz": "Highest clock of that part.",
    },
    (*GPU, "reason"): {
        "sdp_gpu_throttle_reason": "1 if this lowers clocks; gpu_idle and applications_clocks_setting are not faults."
    },
    (*GPU, "cause"): {"sdp_gpu_remapped_rows_total": "Memory rows replaced by spare ones, by cause."},
    (*GPU, "kind"): {
        "sdp_gpu_nvlink_errors_total": "Errors on all NVLinks: crc_flit, crc_data, replay, recovery.",
        "sdp_gpu_ecc_errors_total": "Memory errors, corrected or uncorrected, since the driver was loaded.",
    },
    (*GPU, "xid"): {"sdp_gpu_xid_timestamp_seconds": "Unix time of this XID's last report since the exporter started."},
    PROCESS: {"sdp_gpu_process_memory_bytes": "GPU memory that a process holds."},
    (*NODE, "driver", "cuda"): {"sdp_gpu_driver_info": "1; versions of the driver and its CUDA."},
    NODE: {
        "sdp_exporter_up": "1 if the driver answered this scrape and, if there are GPUs, at least one of them did.",
        "sdp_exporter_read_seconds": "Duration of this scrape.",
    },
    (*NODE, "gpu", "call", "error"): {
        "sdp_exporter_errors_total": "Failed calls by GPU (if about one), call and error; timeout: no return."
    },
    (*NODE, "state"): {"sdp_exporter_processes": "Processes on GPUs: known, or unknown (not in /proc)."},
}
"""Labels -> the metrics that have them, with their help."""

CATALOGUE = tuple(ExportedMetric(name, labels, text) for labels, rows in HELP.items() for name, text in rows.items())
