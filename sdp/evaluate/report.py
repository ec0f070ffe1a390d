"""The tables before and after an evaluation."""

from collections.abc import Mapping
from typing import Any

from sdp.console import counted
from sdp.evaluate.prepare import EvaluatePlan, pinned
from sdp.pool import PoolFigures


def forecast(plan: EvaluatePlan) -> list[tuple[str, str]]:
    """Return the dry run's table: what a run would do."""
    config = plan.config
    lines = []
    for picture_set in plan.sets:
        parts = len(picture_set.storage.names("parts/"))
        limit = f", at most {picture_set.limit:,}" if picture_set.limit is not None else ""
        lines.append(
            (
                picture_set.name,
                f"{picture_set.pictures.uri}: {picture_set.pictures.size}{limit}; {counted(parts, 'part')} of features",
            )
        )
    if plan.reused is not None:
        counts = plan.reused.manifest.counts
        lines.append(
            (
                "reference",
                f"{plan.reused.storage.uri}: features of {counted(counts.written, 'row')} from an earlier evaluation",
            )
        )
    if plan.clip is not None:
        lines.append(("CLIP score", f"by {pinned(plan.clip)}"))
    if plan.features is not None:
        lines.append(("FID, KID", f"by the features of {pinned(plan.features)}, {plan.features.kind}"))
    if plan.loss is not None:
        weights = "moving average" if plan.loss.ema else "raw weights"
        lines.append(("loss", f"of {plan.loss.checkpoint.uri} ({weights}) on {plan.loss.dataset}"))
    scaling = config.scaling
    lines.append(("evaluators", f"{scaling.num_workers} on {scaling.accelerator or 'any node'}"))
    lines.append(("output", config.output.uri))
    return lines


def closing(figures: Mapping[str, Any], run: PoolFigures, remarks: list[str], uri: str) -> list[tuple[str, str]]:
    """Return the closing table: the figures, the notes, and the URI of the evaluation."""
    lines = [("this run", run.summary)] if run.done else []
    if clip := figures.get("clip"):
        score = "no picture has a caption" if clip["score"] is None else _plus(clip["score"], clip["standard_error"], 2)
        lines.append(("CLIP score", f"{score}, {counted(clip['pictures'], 'picture')}"))
    if fid := figures.get("fid"):
        lines.append(
            ("FID", f"{fid['value']:.3f}, {counted(fid['generated'], 'picture')} against {fid['reference']:,}")
        )
        if infinity := figures["fid_infinity"]:
            lines.append(("FID-infinity", f"{infinity['value']:.3f}, from {len(infinity['sizes'])} sizes"))
        if kid := figures["kid"]:
            lines.append(
                ("KID", f"{_plus(kid['mean'], kid['deviation'], 6)}, {kid['subsets']} subsets of {kid['size']:,}")
            )
    if (cosine := figures.get("similarity")) is not None:
        lines.append(("similarity", f"{cosine:.4f}, mean cosine between the features of both sets"))
    if loss := figures.get("loss"):
        lines.append(
            ("loss", f"{_plus(loss['mean'], loss['standard_error'], 4)}, {counted(loss['rows'], 'row')} not trained on")
        )
        lines += [(f"  timesteps {name}", f"{value:.4f}") for name, value in loss["by_timestep"].items()]
    lines += [("note", line) for line in remarks]
    lines.append(("evaluation", uri))
    return lines


def _plus(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"
