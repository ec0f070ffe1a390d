"""A plan as text and as JSON."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sdp.config import JobConfig, TrainConfig
from sdp.console import table
from sdp.errors import UserError
from sdp.hardware import GIB, GPUS, INSTANCES
from sdp.plan import make
from sdp.plan.make import PlannedJob
from sdp.plan.model import Plan, Stage, best_interval, encoders_needed, stretch
from sdp.plan.prices import Prices
from sdp.plan.roofline import fp8_share, line, rooflines
from sdp.plan.speeds import Speeds

HEADER = ("", "stage", "images", "img/s", "limit", "hours", "GPU-hours")
OTHERS = ("on as many other GPUs", "hours", "GPU-hours")
_HOPELESS = 10
"""The largest factor by which interruptions may lengthen a run; a larger one means that a setting is wrong."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that `sdp plan` shows: the configured plan, its alternatives and what follows from them."""

    own: Plan
    """The plan of the configuration."""
    modes: Sequence[Plan]
    others: Sequence[Plan]
    notes: Mapping[str, str]
    """Conclusions by their subject."""
    sources: Sequence[str]


def answer(
    config: JobConfig,
    work: PlannedJob,
    speeds: Speeds,
    prices: Prices,
    *,
    deadline_h: float | None = None,
    budget: float | None = None,
) -> PlanReport:
    """Return the plan of the work, its alternatives and what follows from them."""
    own = make.plan(work, speeds, prices)
    trains = bool(work.trainer_gpus)
    modes = [plan for plan in make.modes(work, speeds, prices) if math.isfinite(plan.hours)]
    others = [plan for plan in make.others(work, speeds, prices) if math.isfinite(plan.hours)]
    plans = [own, *modes, *others]
    notes = dict[str, str]()
    if trains:
        notes["cheapest"] = _brief(min(plans, key=lambda plan: plan.cost), prices)
        notes["fastest"] = _brief(min(plans, key=lambda plan: plan.hours), prices)
        if "online" in work.modes:
            notes["encoders"] = _encoders(work, speeds)
        paid, used = work.trainer_count * work.trainers.gpus, work.trainer_gpus * work.gpus_each
        if paid > used:
            notes["idle"] = (
                f"{paid - used} of the {paid} {work.trainers.gpu} that are paid for; "
                f"--trainers {work.trainer_count}x{work.trainers.name} uses them all"
            )
    if isinstance(config, TrainConfig):
        if share := fp8_share(config):
            notes["fp8"] = (
                f"{share:.0%} of the U-Net's operations, at twice the peak in the roofline; speed and memory are those "
                "of bf16, since no speed of fp8 is published and its layers keep their inputs in bf16"
            )
        notes["roofline"] = "; ".join(line(roofline, work, speeds) for roofline in rooflines(config, work))
    if trains and work.mode == "offline" and work.options.drawing is None:
        notes["captions"] = make.captions(work, own, prices)
    if trains and (interruptions := make.interruptions_of(work, prices)):
        intervals = [make.interval_h(work, stage.rate) for stage in own.stages if stage.limit]
        now, best = intervals[0], best_interval(interruptions)
        if stretch(max(intervals), interruptions) > _HOPELESS:
            raise UserError(
                f"plan: --terms: expected checkpoints more often than interruptions, got a checkpoint every "
                f"{short(max(intervals))} h and an interruption every {short(interruptions.between_h)} h; "
                "lower checkpoint.every_steps"
            )
        notes["spot"] = (
            f"an interruption every {short(interruptions.between_h)} h; checkpoints every {now * 60:,.0f} min lengthen "
            f"the run by {stretch(now, interruptions) - 1:.1%}, every {best * 60:,.0f} min (the best) by "
            f"{stretch(best, interruptions) - 1:.1%}"
        )
    if deadline_h is not None:
        meets = make.in_time(work, speeds, prices, deadline_h)
        none = f"no plan of up to {make.MOST_INSTANCES} instances"
        if not trains and not work.phases:
            none = f"not with {own.name}, the only number of hosts with a published speed"
        notes[f"within {deadline_h:g} h"] = _brief(meets, prices) if meets else none
    if budget is not None:
        within = min((plan for plan in plans if plan.cost <= budget), key=lambda plan: plan.hours, default=None)
        notes[f"within {budget:,.10g} {prices.currency}"] = _brief(within, prices) if within else "none of these plans"
    return PlanReport(own, modes, others, notes, list(_sources(work, [own, *modes], prices)))


def as_text(answer: PlanReport, prices: Prices) -> str:
    """Return an answer for a person."""
    shown = list(answer.modes) or [answer.own]
    lines = [row for plan in shown for row in rows(plan, " *" * (plan.name == answer.own.name))]
    parts = [table(lines, (*HEADER, prices.currency)), "* what the configuration asks for"]
    if answer.others:
        parts += ["", table(brief_rows(answer.others), (*OTHERS, prices.currency, "speeds"))]
    parts += [""] * bool(answer.notes) + [f"{subject}: {note}" for subject, note in answer.notes.items()]
    parts += ["", "Where the figures come from:", *(f"  {source}" for source in answer.sources)]
    return "\n".join(parts)


def as_json(answer: PlanReport, prices: Prices) -> dict[str, Any]:
    """Return an answer for programs."""
    return {
        "currency": prices.currency,
        "plan": _json(answer.own),
        "modes": [_json(plan) for plan in answer.modes],
        "others": [_json(plan) for plan in answer.others],
        "notes": dict(answer.notes),
        "sources": list(answer.sources),
    }


def values(config: JobConfig, work: PlannedJob, own: Plan) -> dict[str, Any]:
    """Return values for charts/sdp-cluster: the plan's worker groups with GPUs, and the jobs placed on them."""
    groups: dict[str, Any] = {"a10g": None, "a100": None}
    jobs: dict[str, Any] = {"process": None, "train": None, "train-online": None, "generate": None}
    trained = [stage.groups for stage in own.stages if stage.limit]
    processed = [stage.groups[0] for stage in own.stages if stage.name == "process"]
    online = [group for plan_groups in trained for group in plan_groups[1:]]
    place = dict[str, dict[str, Any]]()
    for role, section, role_groups in (
        ("trainers", "scaling", [plan_groups[0] for plan_groups in trained]),
        ("encoders", "encode", [*processed, *online]),
    ):
        if not role_groups:
            continue
        most = max(role_groups, key=lambda group: group.count)
        instance = INSTANCES[most.instance]
        accelerators, accelerator = GPUS[str(instance.gpu)].accelerators, getattr(config, section).accelerator
        if accelerator not in accelerators:
            accelerator = accelerators[-1]
        workers = work.trainer_gpus if role == "trainers" else int(most.gpus)
        place[role] = {"accelerator": accelerator, "num_workers": workers}
        groups[role] = {
            "cpu": instance.vcpus - max(1, instance.vcpus // 24),
            "memory": f"{instance.memory_bytes // GIB * 7 // 8}Gi",
            "shmSize": f"{instance.memory_bytes // GIB // 4}Gi",
            "gpus": instance.gpus,
            "accelerator": accelerator,
            "nodeSelector": {"node.kubernetes.io/instance-type": instance.name},
            "minReplicas": 0,
            "maxReplicas": most.count,
        }
        if work.options.terms == "spot" and role == "trainers":
            groups[role]["nodeSelector"]["karpenter.sh/capacity-type"] = "spot"
    if processed:
        jobs["process"] = {"encode": place["encoders"]}
    if trained:
        encode = {"encode": place["encoders"]} if online else {}
        jobs["train"] = {"data": {"mode": work.mode}, "scaling": place["trainers"], **encode}
    if place:
        jobs["generate"] = {"scaling": {"accelerator": next(iter(place.values()))["accelerator"]}}
    return {"groups": groups, "jobs": jobs}


def _json(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"hours": plan.hours, "gpu_hours": plan.gpu_hours, "cost": plan.cost}


def rows(plan: Plan, mark: str = "") -> list[tuple[str, ...]]:
    """Return the rows of a plan's table, whose header is HEADER and the currency."""
    name = plan.name + mark
    lines = [
        (
            *(name if number == 0 else "", stage.name, f"{stage.samples:,}" if stage.samples else ""),
            *(short(stage.rate) if stage.rate else "", stage.limit),
            *_figures(stage),
        )
        for number, stage in enumerate(plan.stages)
    ]
    return [*lines, ("", "all", "", "", "", *_figures(plan))]


def _figures(part: Plan | Stage) -> tuple[str, str, str]:
    """Return hours, GPU-hours and money of a plan or of one stage."""
    hours, gpu_hours = short(part.hours, 1) if part.hours else "", short(part.gpu_hours) if part.gpu_hours else ""
    return hours, gpu_hours, short(part.cost)


def short(value: float, digits: int = 0) -> str:
    """Return an amount with this many decimals; a small one with two, so that it is not shown as 0."""
    if value == 0 or value >= (1 if digits else 10):
        return f"{value:,.{digits}f}"
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def brief_rows(plans: Sequence[Plan]) -> list[tuple[str, ...]]:
    """Return a table row for each plan; its header is OTHERS, the currency and "speeds"."""
    return [(plan.name, *_figures(plan), plan.basis) for plan in plans]


def _brief(plan: Plan, prices: Prices) -> str:
    groups = dict.fromkeys(f"{group.count} x {group.instance}" for stage in plan.stages for group in stage.groups)
    figures = f"{short(plan.hours, 1)} h, {short(plan.cost)} {prices.currency}"
    return f"{plan.name.partition(',')[0]} on {', '.join(groups)}: {figures} ({plan.basis})"


def _encoders(work: PlannedJob, speeds: Speeds) -> str:
    gpu, encoder = str(work.trainers.gpu), str(work.encoders.gpu)
    parts = []
    for phase in work.phases:
        train, encode = speeds.train(gpu, phase.resolution), speeds.encode(encoder, phase.resolution)
        count = encoders_needed(train.value * work.trainer_gpus, encode.value)
        ratio = train.value / encode.value
        parts.append(
            f"{count} {encoder} keep {work.trainer_gpus} {gpu} from waiting at {phase.resolution} px "
            f"({ratio:.2f} each; {encode.value:.0f} img/s an encoder: {encode.source})"
        )
    return "; ".join(parts)


def _sources(work: PlannedJob, plans: Sequence[Plan], prices: Prices) -> Iterator[str]:
    """Yield where the figures of the plans come from: the number of images, the speeds and the prices."""
    if work.rows_assumed:
        yield f"images, {work.rows:,}: assumed, one for each sample of training; set limit or --rows to their number"
    stages = [stage for plan in plans for stage in plan.stages]
    yield from dict.fromkeys(f"{s.name}, {short(s.rate)} img/s: {s.source}" for s in stages if s.rate and s.source)
    for name in dict.fromkeys(group.instance for stage in stages for group in stage.groups):
        row = prices.row(name, work.options.terms) or prices.need(name, "on-demand")
        source = prices.sources.get(row.source, row.source)
        yield f"{name}, {row.per_hour:g} {prices.currency} an hour {row.terms}: {row.region}, {row.as_of}, {source}"
    if work.trainer_gpus:
        storage = prices.storage
        price = f"{storage.per_gb_month:g} {prices.currency} a GB and month"
        yield f"storage, {price}: {storage.as_of}, {storage.source}"
