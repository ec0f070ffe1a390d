"""Every metric that the exporter may export: name, type, unit, labels, help. Nothing else is exported."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue."""

    name: str
    type: Literal["gauge", "counter"]
    unit: str
    """Empty where the value is a count, a flag or a number without a unit."""
    labels: tuple[str, ...]
    help: str


GPU = ("gpu", "uuid", "product", "node")
"""The labels of everything that is said of a GPU: its index on the node, its UUID, its product name, and the node."""
MIG = (*GPU, "mig_uuid", "mig_profile", "gpu_instance", "compute_instance")
PROCESS = (
    *GPU,
    "mig_uuid",
    "pid",
    "container_pid",
    "process",
    "namespace",
    "pod",
    "pod_uid",
    "container",
    "container_id",
    "ray_cluster",
    "ray_group",
)
"""`pid` is the host's; `container_pid` is what the process takes for its own pid, as in `sdp_process_info`."""
NODE = ("node",)

CATALOGUE: tuple[Metric, ...] = (
    # What the GPU is, and whether it answers
    Metric("sdp_gpu_up", "gauge", "", GPU, "1 where the GPU answered this scrape, 0 where it is known and did not."),
    Metric(
        "sdp_gpu_reading_age_seconds",
        "gauge",
        "seconds",
        GPU,
        "Time since the GPU last answered; about 0 while it does.",
    ),
    Metric("sdp_gpu_info", "gauge", "", (*GPU, "pci_bus_id", "minor", "vbios", "mig"), "1; what the GPU is."),
    Metric(
        "sdp_gpu_pod_info",
        "gauge",
        "",
        (*GPU, "mig_uuid", "namespace", "pod", "container"),
        "1 for each container to which the kubelet has allotted the GPU, or a slice of it; idle ones too.",
    ),
    # How busy it is
    Metric(
        "sdp_gpu_utilization_ratio",
        "gauge",
        "ratio",
        GPU,
        "Share of the driver's last sampling period in which any kernel ran, however little of the GPU it filled.",
    ),
    Metric(
        "sdp_gpu_memory_utilization_ratio",
        "gauge",
        "ratio",
        GPU,
        "Share of the driver's last sampling period in which memory was read or written.",
    ),
    Metric("sdp_gpu_encoder_utilization_ratio", "gauge", "ratio", GPU, "How busy the video encoders are."),
    Metric("sdp_gpu_decoder_utilization_ratio", "gauge", "ratio", GPU, "How busy the video decoders are."),
    Metric(
        "sdp_gpu_performance_state",
        "gauge",
        "",
        GPU,
        "P-state: 0 is the fastest, 15 the slowest; 8 is usual when idle.",
    ),
    # Memory (GRAM)
    Metric("sdp_gpu_memory_total_bytes", "gauge", "bytes", GPU, "Memory of the GPU."),
    Metric("sdp_gpu_memory_used_bytes", "gauge", "bytes", GPU, "Memory that processes hold."),
    Metric("sdp_gpu_memory_free_bytes", "gauge", "bytes", GPU, "Memory that nobody holds."),
    Metric("sdp_gpu_memory_reserved_bytes", "gauge", "bytes", GPU, "Memory that the driver and the firmware keep."),
    # Power, heat, clocks
    Metric("sdp_gpu_power_watts", "gauge", "watts", GPU, "Power drawn by the whole board."),
    Metric("sdp_gpu_power_limit_watts", "gauge", "watts", GPU, "The limit of power that is in force."),
    Metric("sdp_gpu_energy_joules_total", "counter", "joules", GPU, "Energy used since the driver was loaded."),
    Metric("sdp_gpu_temperature_celsius", "gauge", "celsius", GPU, "Temperature of the GPU's die."),
    Metric("sdp_gpu_memory_temperature_celsius", "gauge", "celsius", GPU, "Temperature of the GPU's memory."),
    Metric(
        "sdp_gpu_temperature_limit_celsius",
        "gauge",
        "celsius",
        (*GPU, "limit"),
        "Temperature at which the GPU slows down, shuts down, or has reached the most that it is made for.",
    ),
    Metric(
        "sdp_gpu_fan_speed_ratio", "gauge", "ratio", GPU, "Fan speed intended, of the highest; boards with fans only."
    ),
    Metric("sdp_gpu_clock_hertz", "gauge", "hertz", (*GPU, "clock"), "Clock of a part of the GPU."),
    Metric("sdp_gpu_clock_max_hertz", "gauge", "hertz", (*GPU, "clock"), "The highest clock of that part."),
    Metric(
        "sdp_gpu_throttle_reason",
        "gauge",
        "",
        (*GPU, "reason"),
        "1 where this holds the clocks down now; gpu_idle and applications_clocks_setting are no fault.",
    ),
    Metric(
        "sdp_gpu_throttled_seconds_total",
        "counter",
        "seconds",
        (*GPU, "cause"),
        "Time for which clocks were held down by this cause since the driver was loaded.",
    ),
    # Links
    Metric(
        "sdp_gpu_pcie_transmit_bytes_per_second",
        "gauge",
        "bytes/second",
        GPU,
        "Data from the GPU over PCIe, in 20 ms right after the previous scrape.",
    ),
    Metric(
        "sdp_gpu_pcie_receive_bytes_per_second",
        "gauge",
        "bytes/second",
        GPU,
        "Data to the GPU over PCIe, in 20 ms right after the previous scrape.",
    ),
    Metric("sdp_gpu_pcie_replays_total", "counter", "", GPU, "Packets that PCIe had to send again."),
    Metric("sdp_gpu_pcie_link_generation", "gauge", "", GPU, "PCIe generation in use; lower when idle."),
    Metric("sdp_gpu_pcie_link_generation_max", "gauge", "", GPU, "PCIe generation that GPU and slot can reach."),
    Metric("sdp_gpu_pcie_link_width", "gauge", "", GPU, "PCIe lanes in use."),
    Metric("sdp_gpu_pcie_link_width_max", "gauge", "", GPU, "PCIe lanes that GPU and slot have."),
    Metric(
        "sdp_gpu_nvlink_transmit_bytes_total", "counter", "bytes", GPU, "Data sent over all NVLinks, without overhead."
    ),
    Metric("sdp_gpu_nvlink_receive_bytes_total", "counter", "bytes", GPU, "Data received over all NVLinks, likewise."),
    Metric("sdp_gpu_nvlink_links", "gauge", "", GPU, "NVLinks that the GPU has."),
    Metric("sdp_gpu_nvlink_active_links", "gauge", "", GPU, "NVLinks that are up."),
    Metric(
        "sdp_gpu_nvlink_errors_total",
        "counter",
        "",
        (*GPU, "kind"),
        "Errors on all NVLinks: crc_flit, crc_data, replay, recovery.",
    ),
    # Faults
    Metric(
        "sdp_gpu_xid_errors_total", "counter", "", GPU, "XID errors reported by the driver since the exporter started."
    ),
    Metric(
        "sdp_gpu_xid_timestamp_seconds",
        "gauge",
        "seconds",
        (*GPU, "xid"),
        "Unix time at which this XID was last reported, for those seen since the exporter started.",
    ),
    Metric(
        "sdp_gpu_ecc_errors_total",
        "counter",
        "",
        (*GPU, "kind", "since"),
        "Memory errors, corrected or uncorrected, since driver_load or in the board's lifetime.",
    ),
    Metric(
        "sdp_gpu_remapped_rows_total", "counter", "", (*GPU, "cause"), "Memory rows replaced by spare ones, by cause."
    ),
    Metric("sdp_gpu_row_remap_pending", "gauge", "", GPU, "1 where a row is to be replaced at the next reset."),
    Metric(
        "sdp_gpu_row_remap_failed", "gauge", "", GPU, "1 where a row could not be replaced: have the board exchanged."
    ),
    Metric(
        "sdp_gpu_retired_pages_total",
        "counter",
        "",
        (*GPU, "cause"),
        "Memory pages given up (boards older than Ampere).",
    ),
    Metric("sdp_gpu_retired_pages_pending", "gauge", "", GPU, "1 where pages are to be given up at the next reboot."),
    # MIG slices
    Metric("sdp_gpu_mig_info", "gauge", "", MIG, "1 for each MIG slice."),
    Metric("sdp_gpu_mig_memory_total_bytes", "gauge", "bytes", MIG, "Memory of the slice."),
    Metric("sdp_gpu_mig_memory_used_bytes", "gauge", "bytes", MIG, "Memory of the slice that processes hold."),
    Metric("sdp_gpu_mig_memory_free_bytes", "gauge", "bytes", MIG, "Memory of the slice that nobody holds."),
    Metric("sdp_gpu_mig_multiprocessors", "gauge", "", MIG, "Streaming multiprocessors of the slice."),
    # Processes
    Metric("sdp_gpu_process_memory_bytes", "gauge", "bytes", PROCESS, "GPU memory that a process holds."),
    Metric(
        "sdp_gpu_process_sm_utilization_ratio",
        "gauge",
        "ratio",
        PROCESS,
        "Share of time in which the process's kernels ran, by the driver's samples since the previous scrape; absent "
        "where there is none.",
    ),
    # The driver and the exporter
    Metric("sdp_gpu_driver_info", "gauge", "", (*NODE, "driver", "nvml", "cuda"), "1; versions of the driver's parts."),
    Metric(
        "sdp_exporter_up",
        "gauge",
        "",
        NODE,
        "1 where the driver answered this scrape and, if there are GPUs, at least one of them did.",
    ),
    Metric("sdp_exporter_gpus", "gauge", "", NODE, "GPUs that the driver counts."),
    Metric(
        "sdp_exporter_reading_age_seconds",
        "gauge",
        "seconds",
        NODE,
        "Time since a scrape last found sdp_exporter_up to be 1; absent before the first.",
    ),
    Metric("sdp_exporter_read_seconds", "gauge", "seconds", NODE, "Time that this scrape took to read everything."),
    Metric(
        "sdp_exporter_errors_total",
        "counter",
        "",
        (*NODE, "gpu", "call", "error"),
        "Calls that failed, by GPU (empty where it is about none), call and error; timeout: it did not return.",
    ),
    Metric(
        "sdp_exporter_processes",
        "gauge",
        "",
        (*NODE, "state"),
        "Processes on GPUs: known, unreadable (its environment is not ours to read), unknown (not in /proc: hostPID?).",
    ),
    Metric(
        "sdp_exporter_kubelet_up", "gauge", "", NODE, "1 where the kubelet's pod-resources API answered this scrape."
    ),
    Metric("sdp_exporter_build_info", "gauge", "", (*NODE, "version", "python"), "1; versions of the exporter."),
    Metric("sdp_exporter_process_virtual_memory_bytes", "gauge", "bytes", (), "Virtual memory of the exporter."),
    Metric("sdp_exporter_process_resident_memory_bytes", "gauge", "bytes", (), "Resident memory of the exporter."),
    Metric("sdp_exporter_process_start_time_seconds", "gauge", "seconds", (), "Unix time at which it started."),
    Metric("sdp_exporter_process_cpu_seconds_total", "counter", "seconds", (), "CPU time that it used."),
    Metric("sdp_exporter_process_open_fds", "gauge", "", (), "Files and connections that it has open."),
    Metric("sdp_exporter_process_max_fds", "gauge", "", (), "How many it may have open."),
)
