"""The dashboard GPU health: are the GPUs healthy, and are they busy?"""

from scripts.dashboards.panels import (
    BYTES_PER_SECOND,
    CELSIUS,
    COUNT,
    ERRORS_PER_SECOND,
    HERTZ,
    RATIO,
    SECONDS,
    WATTS,
    Dashboard,
    Limits,
    Query,
    Row,
    lines,
    number,
    stacked,
    table,
)
from scripts.dashboards.selecting import NODE, OWNED, RUN, gpu, rate, select

HELD_DOWN = 'reason=~"hw_slowdown|hw_thermal_slowdown|hw_power_brake_slowdown|sw_thermal_slowdown"'
WORTH_A_LOOK = 'reason!~"gpu_idle|applications_clocks_setting"'
OF_GPU = "{{node}}/{{gpu}}"
TEMPERATURE = f"max by (node, uuid, gpu) ({gpu('sdp_gpu_temperature_celsius')})"


def rate_of_gpu(name: str, *more: str) -> str:
    return f"({rate(name, NODE, *more)} {OWNED})"


SM, MEMORY = 'clock="sm"', 'clock="memory"'

_FIRST = Row(
    "Are the GPUs healthy, and are they busy?",
    (
        number(
            "GPUs answering",
            "Out of those known.",
            Query(f"sum({gpu('sdp_gpu_up')})", "answer"),
            Query(f"count({gpu('sdp_gpu_up')})", "of"),
        ),
        number(
            "Utilisation",
            "Mean share of time in which any kernel ran. It does not show efficiency: see MFU and power.",
            Query(f"avg({gpu('sdp_gpu_utilization_ratio')})"),
            unit=RATIO,
        ),
        number(
            "Throttled",
            "GPUs slowed by heat or the power supply now. Running at the power limit is usual and does not count.",
            Query(f"sum(max by (node, uuid) ({gpu('sdp_gpu_throttle_reason', HELD_DOWN)}))"),
            limits=Limits(1, 2),
        ),
        number(
            "XIDs in the last hour",
            "Kinds of driver errors reported, over all GPUs.",
            Query(f"count(time() - {gpu('sdp_gpu_xid_timestamp_seconds')} < 3600) or vector(0)"),
            limits=Limits(1, 2),
        ),
        number(
            "Margin to slowdown",
            "Degrees before the hottest GPU slows down.",
            Query(
                "min(min by (node, uuid, gpu) "
                f"({gpu('sdp_gpu_temperature_limit_celsius')}) "
                f"- on (node, uuid, gpu) {TEMPERATURE})"
            ),
            unit=CELSIUS,
            limits=Limits(10, 3),
        ),
        number(
            "Power",
            "Drawn by all chosen GPUs.",
            Query(f"sum({gpu('sdp_gpu_power_watts')})"),
            unit=WATTS,
        ),
        lines(
            "Utilisation, by GPU",
            "Share of time in which any kernel ran.",
            Query(gpu("sdp_gpu_utilization_ratio"), OF_GPU),
            unit=RATIO,
            width=12,
            most=1,
        ),
        lines(
            "Power, share of the limit",
            "An efficient GPU draws most of its limit. One that is busy and draws half of it waits for memory.",
            Query(
                f"{gpu('sdp_gpu_power_watts')} / on (node, uuid, gpu) {gpu('sdp_gpu_power_limit_watts')}",
                OF_GPU,
            ),
            unit=RATIO,
            width=12,
        ),
    ),
)

_HEAT = Row(
    "Throttling, heat, clocks",
    (
        stacked(
            "GPUs throttled, by reason",
            "sw_power_cap is the power limit and usual under load; slowdowns are not.",
            Query(f"sum by (reason) ({gpu('sdp_gpu_throttle_reason', WORTH_A_LOOK)})", "{{reason}}"),
        ),
        lines(
            "SM clock, share of the maximum",
            "If one GPU stays below the others, check its temperature and power.",
            Query(
                f"{gpu('sdp_gpu_clock_hertz', SM)} / on (node, uuid, gpu) {gpu('sdp_gpu_clock_max_hertz', SM)}",
                OF_GPU,
            ),
            unit=RATIO,
            most=1,
        ),
        lines("GPU temperature", "", Query(gpu("sdp_gpu_temperature_celsius"), OF_GPU), unit=CELSIUS),
        lines(
            "Memory temperature",
            "On boards that report it.",
            Query(gpu("sdp_gpu_memory_temperature_celsius"), OF_GPU),
            unit=CELSIUS,
            width=12,
        ),
        lines("Memory clock", "", Query(gpu("sdp_gpu_clock_hertz", MEMORY), OF_GPU), unit=HERTZ, width=12),
    ),
)

_LINKS = Row(
    "Links and energy",
    (
        lines(
            "PCIe",
            "All chosen GPUs, in samples of 20 ms.",
            Query(f"sum({gpu('sdp_gpu_pcie_receive_bytes_per_second')})", "to GPUs"),
            Query(f"sum({gpu('sdp_gpu_pcie_transmit_bytes_per_second')})", "from GPUs"),
            unit=BYTES_PER_SECOND,
        ),
        lines(
            "NVLink",
            "All chosen GPUs.",
            Query(f"sum({rate_of_gpu('sdp_gpu_nvlink_receive_bytes_total')})", "received"),
            Query(f"sum({rate_of_gpu('sdp_gpu_nvlink_transmit_bytes_total')})", "sent"),
            unit=BYTES_PER_SECOND,
        ),
        lines(
            "Links below capacity",
            "GPUs that use fewer PCIe lanes than they have, and NVLinks that are down.",
            Query(
                f"sum({gpu('sdp_gpu_pcie_link_width')} "
                f"< bool on (node, uuid, gpu) {gpu('sdp_gpu_pcie_link_width_max')})",
                "PCIe narrow",
            ),
            Query(
                f"sum({gpu('sdp_gpu_nvlink_links')} - on (node, uuid, gpu) {gpu('sdp_gpu_nvlink_active_links')})",
                "NVLinks down",
            ),
        ),
        lines(
            "Link errors",
            "Per second: PCIe retransmissions, and NVLink errors.",
            Query(f"sum({rate_of_gpu('sdp_gpu_pcie_replays_total')})", "PCIe replays"),
            Query(f"sum by (kind) ({rate_of_gpu('sdp_gpu_nvlink_errors_total')})", "NVLink {{kind}}"),
            unit=ERRORS_PER_SECOND,
        ),
        lines(
            "Energy per image",
            "Joules that the chosen GPUs, encoders included, use per image trained on.",
            Query(
                f"sum({rate_of_gpu('sdp_gpu_energy_joules_total')}) / sum({rate('sdp_train_samples_total', RUN)})",
                "joules",
            ),
        ),
        lines(
            "Memory utilisation",
            "Share of time in which memory was read or written, by GPU.",
            Query(gpu("sdp_gpu_memory_utilization_ratio"), OF_GPU),
            unit=RATIO,
            most=1,
        ),
    ),
)

_FAULTS = Row(
    "Faults",
    (
        table(
            "XIDs",
            "Time since each was last reported, by GPU. docs/runbooks/xid.md explains them.",
            Query(f"time() - {gpu('sdp_gpu_xid_timestamp_seconds')}"),
            unit=SECONDS,
        ),
        lines(
            "Memory errors",
            "Since the driver was loaded. A few corrected errors are harmless.",
            Query(f"sum by (node, gpu, kind) ({gpu('sdp_gpu_ecc_errors_total')})", f"{OF_GPU} {{{{kind}}}}"),
        ),
        lines(
            "Memory rows replaced",
            "Rows replaced; GPUs that wait for a reset, and GPUs where replacing failed.",
            Query(f"sum by (cause) ({gpu('sdp_gpu_remapped_rows_total')})", "rows, {{cause}}"),
            Query(f"sum({gpu('sdp_gpu_row_remap_pending')})", "wait for a reset"),
            Query(f"sum({gpu('sdp_gpu_row_remap_failed')})", "failed"),
        ),
    ),
)

_EXPORTER = Row(
    "Exporter",
    (
        lines(
            "Driver answers",
            "1 if it answers.",
            Query(select("sdp_exporter_up", NODE), "{{node}}"),
        ),
        lines(
            "Time to read all figures",
            "Near 2 s, a call hangs: see Failed calls.",
            Query(f"{select('sdp_exporter_read_seconds', NODE)}", "{{node}}"),
            unit=SECONDS,
        ),
        lines(
            "Failed calls",
            "Per second, by call and error.",
            Query(f"sum by (call, error) ({rate('sdp_exporter_errors_total', NODE)})", "{{call}} {{error}}"),
            unit=ERRORS_PER_SECOND,
        ),
        lines(
            "Processes on GPUs",
            "Known, or unknown (the exporter lacks hostPID).",
            Query(f"sum by (state) ({select('sdp_exporter_processes', NODE)})", "{{state}}"),
            unit=COUNT,
            width=12,
        ),
        table(
            "Drivers",
            "Several driver versions in one cluster cause trouble.",
            Query(f"count by (driver, cuda) ({select('sdp_gpu_driver_info', NODE)})"),
            width=12,
        ),
    ),
)

DASHBOARD = Dashboard("gpu-health", "GPU health", _FIRST.title, (_FIRST, _HEAT, _LINKS, _FAULTS, _EXPORTER))
