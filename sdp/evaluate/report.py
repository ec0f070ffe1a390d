"""What a person sees of an evaluation: before, during and after it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdp.console import counted, duration
from sdp.evaluate.prepare import Plan, pinned
from sdp.telemetry import Telemetry


@dataclass(slots=True)
class Figures:
    """Counts and seconds of one run."""

    total: int = 0
    """Pictures to be looked at by this run."""
    done: int = 0
    elapsed_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.done / self.elapsed_s if self.elapsed_s else 0.0


def progress_line(figures: Figures) -> str:
    """Where a run is, and how fast."""
    line = f"{figures.done:,} of {counted(figures.total, 'picture')} · {figures.rate:,.3g}/s"
    if 0 < figures.done < figures.total:
        line += f" · ETA {duration((figures.total - figures.done) / figures.rate)}"
    return line


def emit(telemetry: Telemetry, figures: Figures) -> None:
    """The same as metrics."""
    telemetry.show("sdp_job_rows", figures.total, job="evaluate")
    telemetry.show("sdp_job_rows_done", figures.done, job="evaluate")


def forecast(plan: Plan) -> list[tuple[str, str]]:
    """What a run would do."""
    config = plan.config
    lines = []
    for side in plan.sides:
        there = len(side.storage.names("parts/"))
        limit = f", {side.limit:,} of them at most" if side.limit is not None else ""
        lines.append(
            (side.name, f"{side.pictures.uri}: {side.pictures.size}{limit}; {there:,} parts of features are there")
        )
    if plan.made is not None:
        counts = plan.made.manifest.counts
        lines.append(("reference", f"{plan.made.storage.uri}: {counts.written:,} rows of features, made before"))
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


def closing(figures: Mapping[str, Any], said: list[str], uri: str) -> list[tuple[str, str]]:
    """What was found."""
    lines: list[tuple[str, str]] = []
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
    if (alike := figures.get("similarity")) is not None:
        lines.append(("similarity", f"{alike:.4f}, the mean cosine of features of both sets"))
    if loss := figures.get("loss"):
        lines.append(
            ("loss", f"{_plus(loss['mean'], loss['standard_error'], 4)}, {loss['rows']:,} rows not trained on")
        )
        lines += [(f"  timesteps {name}", f"{value:.4f}") for name, value in loss["by_timestep"].items()]
    lines += [("note", line) for line in said]
    lines.append(("evaluation", uri))
    return lines


def _plus(value: float, error: float, digits: int) -> str:
    return f"{value:.{digits}f} ± {error:.{digits}f}"
