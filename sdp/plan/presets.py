"""The tables of the article named in reference.yaml, beside the plan's results from the same rates and prices."""

from typing import Any

from sdp.console import table
from sdp.hardware import INSTANCES
from sdp.plan.make import InstanceGroup, Plan, Stage
from sdp.plan.prices import reference


def preset(name: str) -> list[tuple[Plan, dict[str, float]]]:
    """Return a plan for each row of a table, with the article's figures for it."""
    recorded = reference()["presets"][name]

    def group(instance: str, count: int) -> InstanceGroup:
        return InstanceGroup(instance, count, count * INSTANCES[instance].gpus, count * recorded["prices"][instance])

    def plan(row: dict[str, Any]) -> Plan:
        stages = (
            Stage(s["name"], s["samples"], s["img_per_s"], tuple(group(*pair) for pair in s["groups"].items()))
            for s in row["stages"]
        )
        return Plan(row["name"], tuple(stages))

    return [(plan(row), row["article"]) for row in recorded["rows"]]


def computed(plan: Plan, figure: str) -> float:
    """Return a plan's value of one of the article's figures; hours and prices there are those of training alone."""
    process = sum(stage.cost for stage in plan.stages if stage.name == "process")
    hours = sum(stage.hours for stage in plan.stages if stage.name != "process")
    per_hour = sum(group.per_hour for group in plan.stages[-1].groups)
    figures = {"per_hour": per_hour, "hours": hours, "gpu_hours": plan.gpu_hours, "cost": plan.cost}
    return (figures | {"process_cost": process})[figure]


def preset_text(name: str) -> str:
    """Return a preset as a table for people."""
    recorded = reference()["presets"][name]
    rows = [
        (plan.name, figure.replace("_", " "), f"{printed:,.1f}", f"{value:,.1f}", f"{value / printed - 1:+.2%}")
        for plan, article in preset(name)
        for figure, printed in article.items()
        for value in [computed(plan, figure)]
    ]
    prices = ", ".join(f"{instance} at ${price:g} an hour" for instance, price in recorded["prices"].items())
    header = ("", "figure", "article", "sdp plan", "difference")
    return "\n".join([f"{recorded['title']}; {prices}", "", table(rows, header), "", *recorded["notes"]])
