"""What do the machines and Ray do: who is busy, what queues up, what spills?"""

from scripts.dashboards.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    PER_SECOND,
    RATIO,
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
    """Of what Ray tells as a gauge, though it only grows."""
    return f"sum by ({APART}, operator) ({rate(name, CLUSTER)})"


CPUS, GPUS, LENT = 'Name="CPU"', 'Name="GPU"', 'State="USED"'
BEING_MADE = 'Source="gcs", State=~"PENDING_CREATION|RESTARTING"'

_FIRST = Row(
    "Which machines are busy, what queues up, what spills?",
    (
        number("Nodes", "Ray nodes (pods) that are there.", Query(f"count({select('ray_node_cpu_count', PLACE)})")),
        number(
            "CPU of the busiest group",
            "Mean of its nodes. Near 1 in the group that transforms: that is what holds the encoders back.",
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
            "Of /dev/shm that Ray may use there; when it is full, objects are spilled to disk.",
            Query(f"max({STORE})"),
            unit=RATIO,
            limits=Limits(0.7, 0.9),
        ),
        number(
            "Spilled",
            "Objects on disk: should be 0.",
            Query(f"sum({SPILLED})"),
            unit=BYTES,
            limits=Limits(1, 1e9),
        ),
        number(
            "Blocks in queues",
            "Of all operators of Ray Data.",
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
            "Of the fullest node of each.",
            Query(f"max by ({APART}, ray_group) ({MEMORY})", "{{ray_group}}"),
            unit=RATIO,
            width=12,
            most=1,
        ),
    ),
)

_DATA = Row(
    "Ray Data (download and generate)",
    (
        lines(
            "Blocks in queues",
            "Before each operator. The slow operator is the one behind the longest queue.",
            Query(by_operator("ray_data_operator_queued_blocks"), "{{operator}}"),
        ),
        lines(
            "Rows per second",
            "That each operator gives.",
            Query(rate_by_operator("ray_data_output_rows"), "{{operator}}"),
            unit=PER_SECOND,
        ),
        lines("Tasks that run", "", Query(by_operator("ray_data_num_tasks_running"), "{{operator}}")),
        lines(
            "Back-pressure on outputs",
            "Seconds per second that tasks wait because nobody takes what they have made.",
            Query(rate_by_operator("ray_data_task_output_backpressure_time_s"), "{{operator}}"),
            unit=SECONDS,
        ),
        lines(
            "Back-pressure on submission",
            "Seconds per second in which an operator was not let to begin tasks.",
            Query(rate_by_operator("ray_data_task_submission_backpressure_time"), "{{operator}}"),
            unit=SECONDS,
        ),
        lines(
            "Object store, by operator",
            "What each operator's blocks take.",
            Query(by_operator("ray_data_obj_store_mem_used"), "{{operator}}"),
            unit=BYTES,
        ),
        lines("Actors", "Alive, by operator.", Query(by_operator("ray_data_num_alive_actors"), "{{operator}}")),
        lines("Tasks that failed", "", Query(by_operator("ray_data_num_tasks_failed"), "{{operator}}")),
        lines(
            "The scheduler's loop",
            "Seconds a turn: much more than 0.1 and Ray Data itself is the bottleneck.",
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
            "Of the fullest node of each.",
            Query(f"max by ({APART}, ray_group) ({STORE})", "{{ray_group}}"),
            unit=RATIO,
            most=1,
        ),
        stacked(
            "Where objects are",
            "In shared memory, in the workers' heaps, mapped to disk, or spilled.",
            Query(f"sum by (Location) ({select('ray_object_store_memory', PLACE)})", "{{Location}}"),
            unit=BYTES,
        ),
        lines("Spilled, by node", "", Query(f"sum by ({APART}, node) ({SPILLED})", "{{node}}"), unit=BYTES),
        lines(
            "Disk",
            "Used of the fullest node of each group.",
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

_SCALING = Row(
    "Who is there, and who is waited for",
    (
        stacked(
            "Nodes, by group",
            "",
            Query(f"count by ({APART}, ray_group) ({select('ray_node_cpu_count', PLACE)})", "{{ray_group}}"),
            width=6,
        ),
        lines(
            "Encoders",
            "Ready: of process jobs, which add some while transforms have a backlog, and of online training.",
            Query(per_run(select("sdp_process_encoders", RUN)), "{{run}}"),
            Query(per_run(select("sdp_train_encoders", RUN)), "{{run}}"),
            width=6,
        ),
        lines(
            "Actors that are being made",
            "For long: resources are lacking, or a node is being awaited.",
            Query(
                f"sum by ({APART}, Name) ({select('ray_actors', CLUSTER, BEING_MADE)})",
                "{{Name}}",
            ),
            width=6,
        ),
        lines(
            "Workers of process jobs that died",
            "And were replaced.",
            Query(per_run(select("sdp_process_deaths_total", RUN)), "{{run}}"),
            unit=COUNT,
            width=6,
        ),
        lines(
            "CPUs that are lent out",
            "Of those that Ray has, by group.",
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_resources', PLACE, CPUS, LENT)}) "
                f"/ sum by ({APART}, ray_group) ({select('ray_resources', PLACE, CPUS)})",
                "{{ray_group}}",
            ),
            unit=RATIO,
            most=1,
        ),
        lines(
            "GPUs that are lent out",
            "Of those that Ray has, by group.",
            Query(
                f"sum by ({APART}, ray_group) ({select('ray_resources', PLACE, GPUS, LENT)}) "
                f"/ sum by ({APART}, ray_group) ({select('ray_resources', PLACE, GPUS)})",
                "{{ray_group}}",
            ),
            unit=RATIO,
            most=1,
        ),
        lines(
            "Memory of processes",
            "Their own, by what they run; the ten largest.",
            Query(
                f"topk(10, sum by ({APART}, Component) ({select('ray_component_uss_bytes', PLACE)}))", "{{Component}}"
            ),
            unit=BYTES,
        ),
    ),
)

DASHBOARD = Dashboard("pipeline", "Pipeline", _FIRST.title, (_FIRST, _DATA, _STORE, _SCALING))
