"""The tables before and after an evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any

from sdp.console import counted
from sdp.evaluate.prepare import EvaluatePlan, pinned
from sdp.pool import PoolFigures


def forecast(plan: EvaluatePlan) -> Iterator[tuple[str, str]]:
    """Yield the dry run's table: what a run would do."""
    for each in plan.sets:
        limit = f", at most {each.limit:,}" if each.limit is not None else ""
        parts = counted(len(each.spec.output.names("parts/")), "part")
        yield each.name, f"{each.pictures.uri}: {each.pictures.size}{limit}; {parts} of features"
    if plan.reused is not None:
        rows = counted(plan.reused.manifest.counts.written, "row")
        yield "reference", f"{plan.reused.storage.uri}: features of {rows} from an earlier evaluation"
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
    if clip := figures.get("clip"):
        score = "no picture has a caption" if clip["score"] is None else _plus(clip["score"], clip["standard_error"], 2)
        yield "CLIP score", f"{score}, {counted(clip['pictures'], 'picture')}"
    if fid := figures.get("fid"):
        yield "FID", f"{fid['value']:.3f}, {counted(fid['generated'], 'picture')} against {fid['reference']:,}"
        if infinity := figures["fid_infinity"]:
            yield "FID-infinity", f"{infinity['value']:.3f}, from {len(infinity['sizes'])} sizes"
        if kid := figures["kid"]:
            yield "KID", f"{_plus(kid['mean'], kid['deviation'], 6)}, {kid['subsets']} subsets of {kid['size']:,}"
    if (cosine := figures.get("similarity")) is not None:
        yield "similarity", f"{cosine:.4f}, mean cosine between the features of both sets"
    if loss := figures.get("loss"):
        rows = counted(loss["rows"], "row")
        yield "loss", f"{_plus(loss['mean'], loss['standard_error'], 4)}, {rows} not trained on"
        yield from ((f"  timesteps {name}", f"{value:.4f}") for name, value in loss["by_timestep"].items())
    yield from (("note", line) for line in remarks)
    yield "evaluation", uri


def _plus(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"
