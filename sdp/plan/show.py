"""A plan as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sdp.console import table
from sdp.plan.make import PlannedJob, captions
from sdp.plan.model import Plan, Stage, encoders_needed
from sdp.plan.prices import Prices
from sdp.plan.speeds import Speeds

HEADER = ("", "stage", "images", "img/s", "limit", "hours", "GPU-hours")


def as_text(plans: Sequence[Plan], work: PlannedJob, speeds: Speeds, prices: Prices) -> str:
    """Return plans, of which the first is the configured one, as text for people."""
    lines = [row for number, plan in enumerate(plans) for row in _rows(plan, " *" * (number == 0))]
    parts = [table(lines, (*HEADER, prices.currency)), "* what the configuration asks for", ""]
    parts += [f"{subject}: {note}" for subject, note in notes(plans, work, speeds, prices).items()]
    parts += ["", "Where the figures come from:", *(f"  {source}" for source in sources(work, plans, prices))]
    return "\n".join(parts)


def as_json(plans: Sequence[Plan], work: PlannedJob, speeds: Speeds, prices: Prices) -> dict[str, Any]:
    """Return plans for programs."""
    dumped = [
        asdict(plan) | {"hours": plan.hours, "gpu_hours": plan.gpu_hours, "cost": plan.cost, "basis": plan.basis}
        for plan in plans
    ]
    return {
        "currency": prices.currency,
        "plan": dumped[0],
        "modes": dumped[1:],
        "notes": notes(plans, work, speeds, prices),
        "sources": list(sources(work, plans, prices)),
    }


def notes(plans: Sequence[Plan], work: PlannedJob, speeds: Speeds, prices: Prices) -> dict[str, str]:
    """Return what follows from the plans, by subject."""
    if not work.trainer_gpus:
        return {}
    result = {
        "cheapest": _brief(min(plans, key=lambda plan: plan.cost), prices),
        "fastest": _brief(min(plans, key=lambda plan: plan.hours), prices),
        "encoders": _encoders(work, speeds),
    }
    paid, used = work.trainer_count * work.trainers.gpus, work.trainer_gpus * work.gpus_each
    if paid > used:
        result["idle"] = (
            f"{paid - used} of the {paid} {work.trainers.gpu} that are paid for; "
            f"--trainers {work.trainer_count}x{work.trainers.name} uses them all"
        )
    if work.mode == "offline":
        result["captions"] = captions(work, plans[0], prices)
    if work.options.terms == "spot":
        result["spot"] = "interruptions lengthen the run; they are not counted"
    return result


def _rows(plan: Plan, mark: str = "") -> list[tuple[str, ...]]:
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
        parts.append(
            f"{count} {encoder} keep {work.trainer_gpus} {gpu} from waiting at {phase.resolution} px "
            f"({train.value / encode.value:.2f} each; {encode.value:.0f} img/s an encoder: {encode.source})"
        )
    return "; ".join(parts)


def sources(work: PlannedJob, plans: Sequence[Plan], prices: Prices) -> Iterator[str]:
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
