"""Who holds the GPUs' memory, and how much more would fit?"""

from scripts.dashboards.panels import (
    BYTES,
    RATIO,
    TIMES,
    Dashboard,
    Limits,
    Query,
    Row,
    bars,
    lines,
    number,
    stacked,
    table,
)
from scripts.dashboards.selecting import APART, NODE, RANK, RUN, gpu, select, slices

HELD = select("sdp:gpu_process_memory:bytes", RANK)
TRAINERS_HOLD = select("sdp:gpu_process_memory:bytes", RANK, 'role="trainer"')
USED, TOTAL = gpu("sdp_gpu_memory_used_bytes"), gpu("sdp_gpu_memory_total_bytes")
FULL, FREE = slices("sdp:gpu_memory:ratio"), slices("sdp:gpu_memory_free:bytes")
OF_SLICE = "{{node}}/{{gpu}} {{mig_profile}} {{gpu_instance}}"


def torch(kind: str) -> str:
    """As PyTorch counts it, by trainer."""
    of_kind = select("sdp_train_gpu_memory_bytes", RANK, f'kind="{kind}"')
    return f"max by ({APART}, run, rank) ({of_kind})"


_FIRST = Row(
    "Who holds the GPUs' memory, and how much more would fit?",
    (
        number(
            "Fullest GPU",
            "Used of what processes can have of it (or of a MIG slice), as the driver counts. Trainers keep what they "
            "once reserved: for them, see Peak.",
            Query(f"max({FULL})"),
            unit=RATIO,
            limits=Limits(0.9, 0.97),
        ),
        number("Least free", "On the fullest GPU.", Query(f"min({FREE})"), unit=BYTES),
        number(
            "Peak of the trainers",
            "The most that PyTorch has ever needed at once on a trainer's GPU, of what it could have there: what it "
            "has reserved, and what is free. This is what runs out.",
            Query(f"max({select('sdp:train_gpu_memory_peak:ratio', RUN)})"),
            unit=RATIO,
            limits=Limits(0.9, 0.95),
        ),
        number(
            "Batch could grow to",
            "How many times the batch would fit into the tightest trainer's GPU with 5 % to spare, if all but what is "
            "held between steps grows with it. Try it before you rely on it.",
            Query(f"min({select('sdp:train_batch_room:ratio', RUN)})"),
            unit=TIMES,
        ),
        number(
            "Reserved and not needed",
            "Of what PyTorch holds on the worst trainer: the rest of its peak. Much of it with little free is "
            "fragmentation; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps.",
            Query(f"max(1 - {torch('peak')} / {torch('reserved')})"),
            unit=RATIO,
        ),
        number(
            "Memory of all GPUs",
            "In use, and what there is.",
            Query(f"sum({USED})", "used"),
            Query(f"sum({TOTAL})", "of"),
            unit=BYTES,
        ),
        stacked(
            "By role",
            "Memory that processes hold on all chosen GPUs, by what they are; other is who is not of this platform.",
            Query(f"sum by (role) ({HELD})", "{{role}}"),
            unit=BYTES,
            width=12,
        ),
        lines(
            "By GPU",
            "Used of its memory; a GPU that is cut up (MIG) by its slices.",
            Query(FULL, OF_SLICE),
            unit=RATIO,
            width=12,
            most=1,
        ),
    ),
)

_TRAINERS = Row(
    "Trainers: what PyTorch counts and what the driver counts",
    (
        lines(
            "Allocated, peak, reserved, held, could have",
            "Of the trainer that has most of each. Allocated is in use now, peak was; reserved is kept for later; the "
            "driver counts that and the CUDA context and NCCL's buffers as held. Could have: reserved and what is "
            "free, on the GPU with least.",
            *(Query(f"max({torch(kind)})", kind) for kind in ("allocated", "peak", "reserved")),
            Query(f"max({TRAINERS_HOLD})", "held, by the driver"),
            Query(f"min({select('sdp:train_gpu_memory_capacity:bytes', RUN)})", "could have"),
            unit=BYTES,
            width=12,
        ),
        lines(
            "Held beyond what PyTorch has reserved",
            "CUDA's context, NCCL, cuDNN and whatever else of the process: some 0.5 to 2 GB. What grows leaks.",
            Query(
                f"max by ({APART}, run, rank) ({TRAINERS_HOLD}) - on ({APART}, run, rank) {torch('reserved')}",
                "{{run}} {{rank}}",
            ),
            unit=BYTES,
            width=12,
        ),
        lines(
            "Peak by phase",
            "Of each run, and so of each phase of it: a phase with bigger pictures needs more.",
            Query(f"max by ({APART}, run) ({torch('peak')})", "{{run}}"),
            unit=BYTES,
        ),
        lines(
            "Headroom over the peak",
            "Of the tightest trainer, and of the median: far apart, ranks are not equal.",
            *(
                Query(
                    f"quantile({quantile}, {select('sdp:train_gpu_memory_headroom:bytes', RUN)})",
                    name,
                )
                for quantile, name in ((0, "tightest"), (0.5, "median"))
            ),
            unit=BYTES,
        ),
        lines(
            "Batch could grow to",
            "Times the batch of now, by run; for its tightest trainer.",
            Query(f"min by ({APART}, run) ({select('sdp:train_batch_room:ratio', RUN)})", "{{run}}"),
            unit=TIMES,
        ),
    ),
)

_OTHERS = Row(
    "Encoders and who else is there",
    (
        lines(
            "The most of a process, by role",
            "And GPU product: encoders need little, so several may share a GPU.",
            Query(f"max by (role, product) ({HELD})", "{{role}} on {{product}}"),
            unit=BYTES,
        ),
        bars(
            "Processes that hold most",
            "Now.",
            Query(f"topk(12, {HELD})", "{{pod}} {{role}} {{rank}} {{process}}"),
            unit=BYTES,
        ),
        lines(
            "MIG slices",
            "Used of each slice's memory.",
            Query(
                f"({select('sdp_gpu_mig_memory_used_bytes', NODE)} / {select('sdp_gpu_mig_memory_total_bytes', NODE)})",
                "{{node}}/{{gpu}} {{mig_profile}} {{gpu_instance}}",
            ),
            unit=RATIO,
            most=1,
        ),
        table(
            "GPUs, and whose they are",
            "Used of the memory of each GPU or MIG slice. Idle ones have an owner where the exporter may ask the "
            "kubelet.",
            Query(
                f"{select('sdp:gpu:owner', RANK)} "
                "* on (node, uuid, mig_uuid) group_left (product, mig_profile) "
                f"{select('sdp:gpu_memory:ratio', NODE)}"
            ),
            unit=RATIO,
            width=24,
        ),
    ),
)

DASHBOARD = Dashboard("gram", "GPU memory (GRAM)", _FIRST.title, (_FIRST, _TRAINERS, _OTHERS))
