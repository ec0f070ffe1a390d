"""The dashboard GPU memory: who holds the GPUs' memory, and how much more would fit?"""

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
from scripts.dashboards.selecting import APART, NODE, RANK, RUN, gpu, select

HELD = select("sdp:gpu_process_memory:bytes", RANK)
TRAINERS_HOLD = select("sdp:gpu_process_memory:bytes", RANK, 'role="trainer"')
USED, TOTAL = gpu("sdp_gpu_memory_used_bytes"), gpu("sdp_gpu_memory_total_bytes")
FULL, FREE = gpu("sdp:gpu_memory:ratio"), gpu("sdp:gpu_memory_free:bytes")
FULLEST = (
    f"topk(1, label_replace({select('sdp:gpu:owner', RANK)} * on (node, uuid) group_left () "
    f"{select('sdp:gpu_memory:ratio', NODE)}, 'run', 'no sdp process', 'run', ''))"
)
"""The fullest GPU, with the run that has it."""


def torch(kind: str) -> str:
    """Return the expression for memory as PyTorch counts it, by trainer."""
    of_kind = select("sdp_train_gpu_memory_bytes", RANK, f'kind="{kind}"')
    return f"max by ({APART}, run, rank) ({of_kind})"


_FIRST = Row(
    "Who holds the GPUs' memory, and how much more would fit?",
    (
        number(
            "Fullest GPU",
            "Used share of the memory that processes can have, as the driver counts. Trainers "
            "keep what they once reserved: for them, see their peak.",
            Query(FULLEST, "{{node}}/{{gpu}} {{run}}"),
            unit=RATIO,
            limits=Limits(0.9, 0.97),
        ),
        number("Least free memory", "On the fullest GPU.", Query(f"min({FREE})"), unit=BYTES),
        number(
            "Trainers' peak",
            "The most memory that PyTorch has needed at once, as a share of what it could have on that GPU: what it "
            "has reserved and what is free. Trainers fail when this reaches 1.",
            Query(f"max({select('sdp:train_gpu_memory_peak:ratio', RUN)})"),
            unit=RATIO,
            limits=Limits(0.9, 0.95),
        ),
        number(
            "Batch could grow to",
            "How many times the present batch would fit on the fullest trainer's GPU, with 5 % to spare. Assumes that "
            "all memory except what is held between steps grows with the batch. Try it before you rely on it.",
            Query(f"bottomk(1, {select('sdp:train_batch_room:ratio', RUN)})", "{{run}} {{rank}}"),
            unit=TIMES,
        ),
        number(
            "Reserved but unused",
            "Share of PyTorch's reserved memory above its peak, on the worst trainer. High with little free memory "
            "means fragmentation; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps.",
            Query(f"max(1 - {torch('peak')} / {torch('reserved')})"),
            unit=RATIO,
        ),
        number(
            "Memory of all GPUs",
            "Used, and total.",
            Query(f"sum({USED})", "used"),
            Query(f"sum({TOTAL})", "of"),
            unit=BYTES,
        ),
        stacked(
            "By role",
            "Memory that processes hold on all chosen GPUs, by role; other is a process that sdp did not start.",
            Query(f"sum by (role) ({HELD})", "{{role}}"),
            unit=BYTES,
            width=12,
        ),
        lines(
            "By GPU",
            "Used share of memory.",
            Query(FULL, "{{node}}/{{gpu}}"),
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
            "Allocated, peak, reserved, held, available",
            "For the trainer with the most of each: allocated is in use now, peak was in use at most, reserved is what "
            "PyTorch keeps, held is what the driver counts, with CUDA's context and NCCL's buffers. Available is "
            "reserved plus free memory, on the GPU with the least.",
            *(Query(f"max({torch(kind)})", kind) for kind in ("allocated", "peak", "reserved")),
            Query(f"max({TRAINERS_HOLD})", "held (driver)"),
            Query(f"min({select('sdp:train_gpu_memory_capacity:bytes', RUN)})", "available"),
            unit=BYTES,
            width=12,
        ),
        lines(
            "Held outside PyTorch",
            "CUDA's context, NCCL, cuDNN and the rest of the process: about 0.5 to 2 GB. If it grows, it is a leak.",
            Query(
                f"max by ({APART}, run, rank) ({TRAINERS_HOLD}) - on ({APART}, run, rank) {torch('reserved')}",
                "{{run}} {{rank}}",
            ),
            unit=BYTES,
            width=12,
        ),
        lines(
            "Peak by phase",
            "By run, and so by phase. A phase with larger pictures needs more.",
            Query(f"max by ({APART}, run) ({torch('peak')})", "{{run}}"),
            unit=BYTES,
        ),
        lines(
            "Headroom above the peak",
            "Of the fullest trainer, and the median. If they are far apart, ranks are unequal.",
            *(
                Query(
                    f"quantile({quantile}, {select('sdp:train_gpu_memory_headroom:bytes', RUN)})",
                    name,
                )
                for quantile, name in ((0, "fullest"), (0.5, "median"))
            ),
            unit=BYTES,
        ),
        lines(
            "Batch could grow to",
            "Multiple of the present batch, by run, for its fullest trainer.",
            Query(f"min by ({APART}, run) ({select('sdp:train_batch_room:ratio', RUN)})", "{{run}}"),
            unit=TIMES,
        ),
    ),
)

_OTHERS = Row(
    "Encoders and other processes",
    (
        lines(
            "Largest process, by role",
            "By role and GPU product. Encoders need little, so several may share a GPU.",
            Query(f"max by (role, product) ({HELD})", "{{role}} on {{product}}"),
            unit=BYTES,
        ),
        bars(
            "Largest processes",
            "GPU memory held now.",
            Query(f"topk(12, {HELD})", "{{pod}} {{role}} {{rank}} {{process}}"),
            unit=BYTES,
            width=16,
        ),
        table(
            "GPUs and their owners",
            "Used share of memory.",
            Query(
                f"{select('sdp:gpu:owner', RANK)} "
                "* on (node, uuid) group_left (product) "
                f"{select('sdp:gpu_memory:ratio', NODE)}"
            ),
            unit=RATIO,
            width=24,
        ),
    ),
)

DASHBOARD = Dashboard("gram", "GPU memory (GRAM)", _FIRST.title, (_FIRST, _TRAINERS, _OTHERS))
