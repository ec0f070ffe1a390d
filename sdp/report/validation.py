"""What the report of a run says of the loss on rows that were not trained on."""

from collections.abc import Mapping, Sequence
from typing import Any

from sdp.report import charts
from sdp.report.charts import Line
from sdp.report.page import Block, Drawing, Table

_CURVES = 4
"""Ranges of timesteps that have a curve of their own, besides that of all."""


def validation_blocks(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Its curve, and what it was last by timestep; nothing where it was not measured."""
    measured = {line["validation_step"]: line for line in metrics if line.get("validation")}
    if not measured:
        return []
    steps, found = [float(step) for step in measured], [line["validation"] for line in measured.values()]
    names = [name for name in found[-1] if name != "all"]
    shown = [names[n * (len(names) - 1) // max(1, _CURVES - 1)] for n in range(min(_CURVES, len(names)))]
    curves = [Line(name, steps, [each.get(name) for each in found]) for name in ("all", *dict.fromkeys(shown))]
    rows = [(name, *(float(each[name]) for each in (found[0], found[-1]) if name in each)) for name in found[-1]]
    first, last = next(iter(measured)), list(measured)[-1]
    return [
        Drawing("Loss on rows that are not trained on, by timesteps", charts.lines(curves, x_name="step")),
        Table("Loss on rows that are not trained on", ("timesteps", f"at step {first:,}", f"at step {last:,}"), rows),
    ]
