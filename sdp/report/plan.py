"""The section of a plan: its tables, and charts of throughput and cost by the number of encoders."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sdp import charts
from sdp.charts import Line
from sdp.config import TrainConfig, parse_into
from sdp.errors import SdpError
from sdp.plan import make, show
from sdp.plan.make import Options, PlannedJob
from sdp.plan.model import encoders_needed
from sdp.plan.prices import Prices, load_prices
from sdp.plan.show import HEADER, OTHERS, PlanReport, brief_rows, rows
from sdp.plan.speeds import Speeds
from sdp.report.page import Block, PageSection, Svg, Table, listing
from sdp.storage import Storage
from sdp.train.run_folder import measured_speeds

_POINTS = 40
_RANGE = 1.6
"""End of the curves, as a multiple of the encoders that the trainers need."""


def plan_section(answer: PlanReport, work: PlannedJob, speeds: Speeds, prices: Prices) -> PageSection:
    """Return the section of a plan."""
    shown = list(answer.modes) or [answer.own]
    blocks: list[Block] = [Table("Modes", (*HEADER, prices.currency), [row for plan in shown for row in rows(plan)])]
    for phase in work.phases if work.trainer_gpus else ():
        blocks += _encoders(phase, work, speeds, prices)
    if answer.others:
        blocks.append(Table("Other GPUs", (*OTHERS, prices.currency, "speeds"), brief_rows(answer.others)))
    blocks += listing("Conclusions", [f"{subject}: {note}" for subject, note in answer.notes.items()])
    blocks += listing("Sources of the figures", answer.sources)
    own = answer.own
    figures = [("hours", f"{own.hours:,.1f}"), ("GPU-hours", f"{own.gpu_hours:,.0f}")]
    figures += [(prices.currency, f"{own.cost:,.0f}"), ("speeds", own.basis)]
    return PageSection("Plan", own.name, answer.notes.get("cheapest", ""), True, figures, blocks)


def plan_of_run(run: Storage, config: Mapping[str, Any]) -> PageSection | None:
    """Return the plan of a run at its measured speed, or None if its accelerator has no known price."""
    with suppress(SdpError):
        parsed, prices = parse_into(TrainConfig, config), load_prices(None)
        if parsed.scaling.accelerator is not None:
            work = make.work_of(parsed, prices, Options())
            speeds = make.speeds_of(parsed, work, measured_speeds(run))
            return plan_section(show.answer(parsed, work, speeds, prices), work, speeds, prices)
    return None


def _encoders(phase: make.Phase, work: PlannedJob, speeds: Speeds, prices: Prices) -> list[Block]:
    """Return charts of online training by the number of encoders, compared with offline training."""
    trainer, encoder = str(work.trainers.gpu), str(work.encoders.gpu)
    most = speeds.train(trainer, phase.resolution).value * work.trainer_gpus
    needed = encoders_needed(most, speeds.encode(encoder, phase.resolution).value)
    end = max(4, round(needed * _RANGE))
    counts = sorted({max(1, round(end * n / _POINTS)) for n in range(1, _POINTS + 1)} | {needed})
    stages = [make.online(phase, work, count, speeds, prices) for count in counts]
    enough = make.online(phase, work, needed, speeds, prices)
    x = [float(count) for count in counts]
    millions = phase.samples / 1e6
    where = f"{work.trainer_gpus} {trainer} at {phase.resolution} px"
    axis = f"{encoder} for encoding"
    rate = [Line("online", x, [stage.rate for stage in stages]), Line("offline", x, [most] * len(x), faint=True)]
    money = [
        Line("online", x, [stage.cost / millions for stage in stages]),
        Line("trainers alone", x, [enough.hours * enough.groups[0].per_hour / millions] * len(x), faint=True),
    ]
    return [
        Svg(f"Images per second, {where}", charts.lines(rate, x_name=axis, zero=True, half=True), True),
        Svg(f"{prices.currency} per million images, {where}", charts.lines(money, x_name=axis, half=True), True),
    ]
