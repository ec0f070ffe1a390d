"""The tables before and after an evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any

from sdp.evaluate.layout import headlines
from sdp.evaluate.prepare import EvaluatePlan, pinned
from sdp.pool import PoolFigures


def forecast(plan: EvaluatePlan) -> Iterator[tuple[str, str]]:
    """Yield the dry run's table: what a run would do."""
    for each in plan.sets:
        limit = f", at most {each.limit:,}" if each.limit is not None else ""
        yield each.name, f"{each.pictures.uri}: {each.pictures.size}{limit}"
    if plan.clip is not None:
        yield "CLIP score", f"by {pinned(plan.clip)}"
    if plan.features is not None:
        yield "FID, KID", f"by the features of {pinned(plan.features)}, {plan.features.kind}"
    if plan.loss is not None:
        weights = "moving average" if plan.loss.ema else "raw weights"
        yield "loss", f"of {plan.loss.checkpoint.uri} ({weights}) on {plan.loss.dataset}"
    scaling = plan.config.scaling
    yield "evaluators", f"{scaling.num_workers} on {scaling.accelerator or 'any node'}"
    yield "output", plan.config.output.uri


def closing(figures: Mapping[str, Any], run: PoolFigures, remarks: list[str], uri: str) -> Iterator[tuple[str, str]]:
    """Yield the closing table: the figures, the notes, and the URI of the evaluation."""
    if run.done:
        yield "this run", run.summary
    for name, value, explanation in headlines(figures):
        yield name, f"{value}, {explanation}" if value else explanation
    by_timestep = figures["loss"]["by_timestep"] if "loss" in figures else {}
    yield from ((f"  timesteps {name}", f"{value:.4f}") for name, value in by_timestep.items())
    yield from (("note", line) for line in remarks)
    yield "evaluation", uri
