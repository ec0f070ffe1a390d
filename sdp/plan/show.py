"""A plan as text."""

from collections.abc import Iterator, Sequence

from sdp.console import size, table
from sdp.plan.make import Plan, PlannedTraining, Stage, encoders_needed
from sdp.plan.prices import Prices

HEADER = ("", "stage", "images", "img/s", "limit", "hours", "GPU-hours")


def as_text(plans: Sequence[Plan], work: PlannedTraining | None, prices: Prices) -> str:
    """Return plans, of which the first is the configured one, as text for people; `work` is a training's."""
    lines = [row for number, plan in enumerate(plans) for row in _rows(plan, "" if number else " *")]
    text = [table(lines, (*HEADER, prices.currency)), "* what the configuration asks for"]
    if work:
        text.append(f"encoders: {'; '.join(_encoders(work))}")
    text += ["", "Where the figures come from:", *(f"  {source}" for source in sources(work, plans, prices))]
    return "\n".join(text)


def _rows(plan: Plan, mark: str) -> Iterator[tuple[str, ...]]:
    yield plan.name + mark, "all", "", "", "", *_figures(plan)
    for stage in plan.stages:
        yield "", stage.name, f"{stage.samples:,}", short(stage.rate), stage.limit, *_figures(stage)
    if plan.storage_cost:
        yield "", "storage", size(plan.stored), "", "", "", "", short(plan.storage_cost)


def _figures(part: Plan | Stage) -> tuple[str, str, str]:
    """Return hours, GPU-hours and money of a plan or of one stage."""
    return short(part.hours, 1), short(part.gpu_hours) if part.gpu_hours else "", short(part.cost)


def short(value: float, digits: int = 0) -> str:
    """Return an amount with this many decimals; a small one with two, so that it is not shown as 0."""
    if value == 0 or value >= (1 if digits else 10):
        return f"{value:,.{digits}f}"
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def _encoders(work: PlannedTraining) -> Iterator[str]:
    gpu, encoder = str(work.trainers.gpu), str(work.encoders.gpu)
    for phase in work.phases:
        train, encode = work.speeds.train(gpu, phase.resolution), work.speeds.encode(encoder, phase.resolution)
        count = encoders_needed(train.value * work.trainer_gpus, encode.value)
        yield (
            f"{count} {encoder} keep {work.trainer_gpus} {gpu} from waiting at {phase.resolution} px "
            f"({train.value / encode.value:.2f} each; {encode.value:.0f} img/s an encoder: {encode.source})"
        )


def sources(work: PlannedTraining | None, plans: Sequence[Plan], prices: Prices) -> Iterator[str]:
    """Yield where the figures of the plans come from: the number of images, the speeds and the prices."""
    if work is not None and work.rows_assumed:
        yield f"images, {work.rows:,}: assumed, one for each sample of training; set limit or --rows to their number"
    stages = [stage for plan in plans for stage in plan.stages]
    yield from dict.fromkeys(f"{stage.name}, {short(stage.rate)} img/s: {stage.source}" for stage in stages)
    if any(plan.storage_cost for plan in plans):
        yield f"storage, {prices.storage_gb_month:g} {prices.currency} for a gigabyte and month of the whole plan"
    for name in dict.fromkeys(group.instance for stage in stages for group in stage.groups):
        row = prices.need(name)
        source = prices.sources.get(row.source, row.source)
        yield f"{name}, {row.per_hour:g} {prices.currency} an hour: {row.as_of}, {source}"
