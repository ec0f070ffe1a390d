"""The tables before and after a run."""

from sdp.config import GenerateConfig
from sdp.console import counted, size
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import Output
from sdp.generate.layout import IMAGES
from sdp.generate.source import GenerateModel
from sdp.pool import PoolFigures


def forecast(
    config: GenerateConfig, output: Output, model: GenerateModel, prompts: int, taken_down: int = 0
) -> list[tuple[str, str]]:
    """Return the dry run's table: what a run would do."""
    works, pending = output.index.works(), output.pending()
    sampler, scaling = config.sampler, config.scaling
    guidance = f"guidance {sampler.guidance_scale:g}" if sampler.guidance_scale > 1 else "no guidance"
    weights = ", its moving average" if model.ema else ""
    note = f" ({taken_down:,} of them taken down and not drawn)" if taken_down else ""
    return [
        ("prompts", f"{prompts:,}{note}, {counted(config.images_per_prompt, 'picture')} each"),
        ("drawn with", f"{model.uri}{weights} (sha256 {model.digest[:16]}…)"),
        ("model", f"{model.base} (sha256 {(model.base.sha256 or '')[:16]}…)"),
        ("sampler", f"{sampler.scheduler}, {counted(sampler.steps, 'step')}, {guidance}, {config.resolution} px"),
        ("output", f"{config.output.uri}: {len(works) - len(pending)} of {counted(len(works), 'part')} written"),
        ("to do", f"{counted(len(pending), 'part')}, {counted(sum(len(work.unit) for work in pending), 'picture')}"),
        ("generators", f"{scaling.num_workers} on {scaling.accelerator or 'any node'}"),
    ]


def closing(dataset: Dataset, figures: PoolFigures, sheet: str | None, image_files: bool) -> list[tuple[str, str]]:
    """Return the closing table: the dataset's counts, this run's figures, where to look."""
    counts = dataset.manifest.counts
    lines = [
        ("written", f"{counts.written:,} of {counted(counts.input, 'picture')}, {size(dataset.manifest.size)}"),
        *((f"  {reason}", f"{count:,}") for reason, count in counts.reasons.items()),
    ]
    if figures.total:
        lines.append(("this run", figures.summary))
    else:
        lines.append(("this run", "nothing to do: all parts existed"))
    if sheet:
        lines.append(("look at", sheet))
    if image_files:
        lines.append(("pictures", dataset.storage.uri_of(IMAGES.rstrip("/"))))
    lines.append(("dataset", dataset.storage.uri))
    return lines
