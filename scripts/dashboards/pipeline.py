"""The dashboard Pipeline: which machines are busy, what queues up, what spills?"""

from scripts.dashboards.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    RATIO,
    ROWS_PER_SECOND,
    SECONDS,
    Dashboard,
    Limits,
    Query,
    Row,
    lines,
    number,
    stacked,
)
from scripts.dashboards.selecting import APART, CLUSTER, PLACE, RUN, per_run, rate, select

CPU = f"{select('ray_node_cpu_utilization', PLACE)} / 100"
MEMORY = f"{select('ray_node_mem_used', PLACE)} / {select('ray_node_mem_total', PLACE)}"
STORE_USED = select("ray_object_store_used_memory", PLACE)
STORE_FREE = select("ray_object_store_available_memory", PLACE)
STORE = f"{STORE_USED} / ({STORE_USED} + {STORE_FREE})"
SPILLED = select("ray_object_store_memory", PLACE, 'Location="SPILLED"')


def by_operator(name: str) -> str:
    return f"sum by ({APART}, operator) ({select(name, CLUSTER)})"


def rate_by_operator(name: str) -> str:
    """Return the rate of a figure that Ray exports as a gauge although it only grows."""
    return f"sum by ({APART}, operator) ({rate(name, CLUSTER)})"


CPUS, GPUS, IN_USE = 'Name="CPU"', 'Name="GPU"', 'State="USED"'
STARTING = 'Source="gcs", State=~"PENDING_CREATION|RESTARTING"'

_FIRST = Row(
    "Which machines are busy, what queues up, what spills?",
    (
        number("Nodes", "Ray nodes (pods) alive.", Query(f"count({select('ray_node_cpu_count', PLACE)})")),
        number(
            "CPU of the busiest group",
            "Mean of its nodes. Near 1 in the group that transforms, CPUs limit the encoders.",
            Query(f"max(avg by ({APART}, ray_group) ({CPU}))"),
            unit=RATIO,
        ),
        number(
            "Memory of the fullest node",
            "Above 0.95 Ray kills workers.",
            Query(f"max({MEMORY})"),
            unit=RATIO,
            limits=Limits(0.85, 0.95),
        ),
        number(
            "Fullest object store",
            "Used share of Ray's /dev/shm. When it is full, Ray spills objects to disk.",
            Query(f"max({STORE})"),
            unit=RATIO,
            limits=Limits(0.7, 0.9),
        ),
        number(
            "Spilled",
            "Objects on disk. Should be 0.",
            Query(f"sum({SPILLED})"),
            unit=BYTES,
            limits=Limits(1, 1e9),
        ),
        number(
            "Blocks in queues",
            "Over all operators of Ray Data.",
            Query(f"sum({select('ray_data_operator_queued_blocks', CLUSTER)})"),
        ),
        lines(
            "CPU, by group",
            "Mean of its nodes.",
            Query(f"avg by ({APART}, ray_group) ({CPU})", "{{ray_group}}"),
            unit=RATIO,
            width=12,
            most=1,
        ),
        lines(
            "Memory, by group",
            "Fullest node of each group.",
            Query(f"max by ({APART}, ray_group) ({MEMORY})", "{{ray_group}}"),
            unit=RATIO,
            width=12,
            most=1,
        ),
    ),
)

_DATA = Row(
    "Ray Data",
    (
        lines(
            "Blocks in queues",
            "Before each operator. The operator after the longest queue is the slow one.",
            Query(by_operator("ray_data_operator_queued_blocks"), "{{operator}}"),
        ),
        lines(
            "Rows per second",
            "Output of each operator.",
            Query(rate_by_operator("ray_data_output_rows"), "{{operator}}"),
            unit=ROWS_PER_SECOND,
        ),
        lines("Tasks running", "", Query(by_operator("ray_data_num_tasks_running"), "{{operator}}")),
        lines(
            "Back-pressure on outputs",
            "Seconds per second that tasks wait because their output is not consumed.",
            Query(rate_by_operator("ray_data_task_output_backpressure_time_s"), "{{operator}}"),
            unit=SECONDS,
        ),
        lines(
            "Back-pressure on submission",
            "Seconds per second in which an operator may not start tasks.",
            Query(rate_by_operator("ray_data_task_submission_backpressure_time"), "{{operator}}"),
            unit=SECONDS,
        ),
        lines(
            "Object store, by operator",
            "Memory of each operator's blocks.",
            Query(by_operator("ray_data_obj_store_mem_used"), "{{operator}}"),
            unit=BYTES,
        ),
        lines("Actors", "Alive, by operator.", Query(by_operator("ray_data_num_alive_actors"), "{{operator}}")),
        lines("Failed tasks", "", Query(by_operator("ray_data_num_tasks_failed"), "{{operator}}")),
        lines(
            "Scheduler loop",
            "Seconds per iteration. Much above 0.1, Ray Data itself is the bottleneck.",
            Query(f"max({select('ray_data_sched_loop_duration_s', CLUSTER)})", "slowest"),
            unit=SECONDS,
        ),
    ),
)

_STORE = Row(
    "Object store and disk",
    (
        lines(
            "Object store, by group",
            "Fullest node of each group.",
            Query(f"max by ({APART}, ray_group) ({STORE})", "{{ray_group}}"),
            unit=RATIO,
            most=1,
        ),
        stacked(
            "Objects, by location",
            "In shared memory, in the workers' heaps, mapped to disk, or spilled.",
            Query(f"sum by (Location) ({select('ray_object_store_memory', PLACE)})", "{{Location}}"),
            unit=BYTES,
        ),
        lines("Spilled, by node", "", Query(f"sum by ({APART}, node) ({SPILLED})", "{{node}}"), unit=BYTES),
        lines(
            "Disk",
            "Used share on the fullest node of each group.",
            Query(
                f"max by ({APART}, ray_group) ({select('ray_node_disk_utilization_percentage', PLACE)}) / 100",
                "{{ray_group}}",
            ),
            unit=RATIO,
            most=1,
        ),
        lines(
            "Disk traffic",
            "By group.",
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_node_disk_io_read_speed', PLACE)})", "read, {{ray_group}}"
            ),
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_node_disk_io_write_speed', PLACE)})",
                "written, {{ray_group}}",
            ),
            unit=BYTES_PER_SECOND,
        ),
        lines(
            "Network",
            "By group.",
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_node_network_receive_speed', PLACE)})",
                "received, {{ray_group}}",
            ),
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_node_network_send_speed', PLACE)})", "sent, {{ray_group}}"
            ),
            unit=BYTES_PER_SECOND,
        ),
    ),
)

_NAMED = f'label_replace({select("ray_component_uss_bytes", PLACE)}, "Component", "$1", "Component", "/.*/([^/]*)")'
"""Processes' memory by name; a driver's component is the path of its Python."""

_SCALING = Row(
    "Nodes, workers and scaling",
    (
        stacked(
            "Nodes, by group",
            "",
            Query(f"count by ({APART}, ray_group) ({select('ray_node_cpu_count', PLACE)})", "{{ray_group}}"),
            width=6,
        ),
        lines(
            "Encoders",
            "Ready encoders of process jobs, which add some while transforms have a backlog, and of online training.",
            Query(per_run(select("sdp_process_encoders", RUN)), "{{run}}"),
            Query(per_run(select("sdp_train_encoders", RUN)), "{{run}}"),
            width=6,
        ),
        lines(
            "Actors starting",
            "If they stay here, resources are lacking or a node has not come yet.",
            Query(
                f"sum by ({APART}, Name) ({select('ray_actors', CLUSTER, STARTING)})",
                "{{Name}}",
            ),
            width=6,
        ),
        lines(
            "Workers of process jobs lost",
            "Each is replaced.",
            Query(per_run(select("sdp_process_deaths_total", RUN)), "{{run}}"),
            unit=COUNT,
            width=6,
        ),
        lines(
            "CPUs allocated",
            "Share of Ray's total, by group.",
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_resources', PLACE, CPUS, IN_USE)}) "
                f"/ sum by ({APART}, ray_group) ({select('ray_resources', PLACE, CPUS)})",
                "{{ray_group}}",
            ),
            unit=RATIO,
            most=1,
        ),
        lines(
            "GPUs allocated",
            "Share of Ray's total, by group.",
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_resources', PLACE, GPUS, IN_USE)}) "
                f"/ sum by ({APART}, ray_group) ({select('ray_resources', PLACE, GPUS)})",
                "{{ray_group}}",
            ),
            unit=RATIO,
            most=1,
        ),
        lines(
            "Process memory",
            "Unshared memory, by what a process runs; the ten largest.",
            Query(
                f"topk(10, sum by ({APART}, Component) ({_NAMED}))",
                "{{Component}}",
            ),
            unit=BYTES,
        ),
    ),
)

DASHBOARD = Dashboard("pipeline", "Pipeline", _FIRST.title, (_FIRST, _DATA, _STORE, _SCALING))
