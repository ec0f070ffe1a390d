"""What a person sees of a run: before, during and after it."""

from dataclasses import dataclass

from sdp.config import GenerateConfig
from sdp.console import counted, duration, size
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import Output
from sdp.generate.layout import IMAGES
from sdp.generate.source import Drawer
from sdp.telemetry import Telemetry


@dataclass(slots=True)
class Figures:
    """Counts and seconds of one run."""

    total: int = 0
    """Addresses to be worked off by this run."""
    done: int = 0
    parts: int = 0
    elapsed_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.done / self.elapsed_s if self.elapsed_s else 0.0


def progress_line(figures: Figures) -> str:
    """Where a run is, and how fast."""
    line = f"{figures.done:,} of {counted(figures.total, 'picture')} · {figures.rate:.2g}/s"
    if 0 < figures.done < figures.total:
        line += f" · ETA {duration((figures.total - figures.done) / figures.rate)}"
    return line


def forecast(
    config: GenerateConfig, output: Output, drawer: Drawer, prompts: int, taken_down: int = 0
) -> list[tuple[str, str]]:
    """What a run would do."""
    works, pending = output.index.works(), output.pending()
    sampler, scaling = config.sampler, config.scaling
    guidance = f"guidance {sampler.guidance_scale:g}" if sampler.guidance_scale > 1 else "no guidance"
    weights = ", its moving average" if drawer.ema else ""
    gone = f" ({taken_down:,} of them taken down, and not drawn)" if taken_down else ""
    return [
        ("prompts", f"{prompts:,}{gone}, {counted(config.images_per_prompt, 'picture')} each"),
        ("drawn with", f"{drawer.uri}{weights} (sha256 {drawer.digest[:16]}…)"),
        ("model", f"{drawer.model} (sha256 {(drawer.model.sha256 or '')[:16]}…)"),
        ("sampler", f"{sampler.scheduler}, {sampler.steps} steps, {guidance}, {config.resolution} px"),
        ("output", f"{config.output.uri}: {len(works) - len(pending)} of {len(works)} parts are there"),
        ("to do", f"{counted(len(pending), 'part')}, {counted(sum(len(work.unit) for work in pending), 'picture')}"),
        ("generators", f"{scaling.num_workers} on {scaling.accelerator or 'any node'}"),
    ]


def emit(telemetry: Telemetry, figures: Figures) -> None:
    """The same as metrics."""
    telemetry.show("sdp_job_rows", figures.total, job="generate")
    telemetry.show("sdp_job_rows_done", figures.done, job="generate")
    telemetry.reach("sdp_generate_images_total", figures.done)


def closing(dataset: Dataset, figures: Figures, sheet: str | None, image_files: bool) -> list[tuple[str, str]]:
    """What there is now, what this run did, where to look."""
    counts = dataset.manifest.counts
    lines = [
        ("written", f"{counts.written:,} of {counted(counts.input, 'picture')}, {size(dataset.manifest.size)}"),
        *((f"  {reason}", f"{count:,}") for reason, count in counts.reasons.items()),
    ]
    if figures.parts:
        lines.append(
            (
                "this run",
                f"{counted(figures.done, 'picture')} in {duration(figures.elapsed_s)}, {figures.rate:.2g} a second",
            )
        )
    else:
        lines.append(("this run", "nothing to do: every part was there"))
    if sheet:
        lines.append(("look at", sheet))
    if image_files:
        lines.append(("pictures", dataset.storage.uri_of(IMAGES.rstrip("/"))))
    lines.append(("dataset", dataset.storage.uri))
    return lines
