"""The tables of the article named in reference.yaml, beside the plan's results from the same rates and prices."""

from collections.abc import Iterator
from typing import Any

from sdp.console import table
from sdp.hardware import INSTANCES
from sdp.plan.make import InstanceGroup, Plan, Stage
from sdp.plan.prices import reference
from sdp.plan.speeds import Speeds

Published = tuple[str, str, str, float | None, float | None]
"""A row, its figure, the figure's kind (explained in reference.yaml), the article's value and the plan's."""


def figures(name: str) -> Iterator[Published]:
    """Yield the figures of one of the article's tables."""
    recorded = reference()["presets"][name]
    for row in recorded.get("rows", ()):
        yield from _planned(row, recorded["prices"])
    for row in (row for row in reference()["training"] if row["table"] == recorded.get("table")):
        kind = "input" if "strategy" in row else "measured"
        yield row["column"], f"img/s at {row['resolution']} px", kind, row["img_per_s"], None
    trainers, encoder = Speeds().train("A100-80G", 256).value * 32, Speeds().encode("A10G", 256).value
    for count in recorded.get("encoders", ()):
        printed = recorded["article"].get(str(count))
        kind = "derived" if printed is None else "input"
        yield f"{count} A10G", "img/s at 256 px", kind, printed, min(trainers, encoder * count)


def _planned(row: dict[str, Any], prices: dict[str, float]) -> Iterator[Published]:
    """Yield the figures of a row; `hours` and `per_hour` cover training only."""
    stages = []
    for stage in row["stages"]:
        counts = stage["groups"].items()
        groups = tuple(InstanceGroup(name, n, n * INSTANCES[name].gpus, n * prices[name]) for name, n in counts)
        stages.append(Stage(stage["name"], stage["samples"], stage["img_per_s"], groups))
    trained = tuple(stage for stage in stages if stage.name != "process")
    plan, training = Plan(row["name"], tuple(stages)), Plan(row["name"], trained)
    for stage in trained:
        yield plan.name, f"img/s, {stage.name}", "input", stage.rate, None
    computed = {
        "per_hour": training.cost / training.hours,
        "hours": training.hours,
        "gpu_hours": plan.gpu_hours,
        "cost": plan.cost,
        "process_cost": plan.cost - training.cost,
    }
    for figure, printed in row["article"].items():
        kind = "input" if figure in row.get("inputs", ()) else "derived"
        yield plan.name, figure.replace("_", " "), kind, printed, computed[figure]


def preset_text(name: str) -> str:
    """Return a preset as a table for people."""
    recorded, measured = reference()["presets"][name], reference()["ours"].get(name, {})
    rows = []
    for row, figure, kind, printed, computed in figures(name):
        values = (printed, computed, measured.get(row, {}).get(figure))
        # Inputs are not compared: the plan takes them from the article.
        difference = f"{computed / printed - 1:+.2%}" if computed and printed and kind == "derived" else ""
        rows.append((row, figure, kind, *("-" if value is None else f"{value:,.1f}" for value in values), difference))
    header = ("", "figure", "kind", "article", "sdp plan", "ours", "difference")
    notes = [*recorded.get("notes", ()), reference()["kinds"]]
    return "\n".join([recorded["title"], "", table(rows, header), "", *notes])
