"""A run's figures, and what a person and Prometheus see of them: forecast, progress line, summary, metrics."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sdp.config.process import ProcessConfig
from sdp.console import counted, duration, rate, rerun, size, spent
from sdp.datasets import tombstones
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import OUTCOMES, Counts
from sdp.datasets.output import Output
from sdp.encode.recipe import TEXT
from sdp.encode.table import bytes_per_row
from sdp.encode.work import EncodeSpec
from sdp.process.prepare import AnyConfig, Config, Prepared, Spec
from sdp.runners.desk import State
from sdp.runners.stages import PrepareStats
from sdp.telemetry import Telemetry

STARVED = 0.1
"""Encoders that wait for a larger share of their time than this make the transforms the bottleneck."""
_STEADY_S = 60.0
"""The shortest run whose bottleneck is worth naming."""


TableLine = tuple[str, str]
"""A line of a table: its name, and the text."""


@dataclass(slots=True)
class ProcessFigures:
    """Counts and seconds of one run; seconds are summed over workers."""

    job: str = "process"
    rows_total: int = 0
    """Addresses that this run has to do."""
    images_total: int = 0
    """An estimate of their images."""
    rows_done: int = 0
    """Addresses of units that are written."""
    counts: Counts = field(default_factory=Counts)
    """Their outcomes."""
    images_encoded: int = 0
    bytes_written: int = 0
    parts_written: int = 0
    busy_s: float = 0.0
    """Time that encoders worked."""
    idle_s: float = 0.0
    """Time that encoders waited for input, after their first."""
    pipeline: State = field(default_factory=State)
    """The pipeline's state now."""
    transforms_most: int = 0
    encoders_most: int = 0
    fitting: dict[int, int] = field(default_factory=dict)
    """The size to which batches were split where memory was short, by resolution (or TEXT)."""
    gpus_each: float = 0.0
    """GPUs of an encoder."""
    elapsed_s: float = 1e-9
    transformed_on: Counter[str] = field(default_factory=Counter)
    encoded_on: Counter[str] = field(default_factory=Counter)
    """Images, by the node that encoded them."""

    @property
    def wait(self) -> float:
        """The share of their time that encoders waited for input."""
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s + self.idle_s else 0.0

    @property
    def rate(self) -> float:
        """Images that were encoded, per second."""
        return self.images_encoded / self.elapsed_s

    @property
    def transformed(self) -> PrepareStats:
        """The images of all transforms, and the time they took."""
        return self.pipeline.prepared

    @property
    def deaths(self) -> int:
        """The number of workers that died and were replaced."""
        return sum(self.pipeline.deaths.values())

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the encoders, at work or waiting."""
        return self.gpus_each * (self.busy_s + self.idle_s) / 3600

    @property
    def bytes_per_image(self) -> float:
        return self.bytes_written / self.counts.written if self.counts.written else 0.0


def suggestion(figures: ProcessFigures) -> str:
    """Name the bottleneck and what would help."""
    waited = f"waited {figures.wait * 100:.0f} % of their time for input"
    if figures.wait < STARVED:
        return f"the encoders ({waited}); raise encode.num_workers or add GPUs"
    if figures.transformed.reading_s > figures.transformed.seconds:
        return f"the source's storage (encoders {waited}); add CPU nodes, to read more at once"
    return f"the transforms (encoders {waited}); add CPU nodes, or use fewer encoders"


def progress_line(figures: ProcessFigures) -> str:
    """Return the run's progress: rows, rates, waiting and time left."""
    line = f"{figures.rows_done:,} of {counted(figures.rows_total, 'row')}"
    if figures.images_encoded:
        line += (
            f" · encode {rate(figures.rate)} img/s · transform {rate(figures.transformed.items / figures.elapsed_s)} "
            f"img/s · encoders wait {figures.wait * 100:.0f} %"
        )
    if figures.counts.written:
        line += f" · {size(figures.bytes_per_image)} an image"
    if figures.deaths:
        line += f" · {counted(figures.deaths, 'worker')} replaced"
    if figures.gpu_hours:
        line += f" · {figures.gpu_hours:,.2f} GPU-hours"
    images = figures.images_encoded / figures.images_total if figures.images_total else 0.0
    rows = figures.rows_done / figures.rows_total if figures.rows_total else 0.0
    share = max(images, rows)  # many rows may have no image
    if 0.01 < share < 1:
        line += f" · ETA {duration(figures.elapsed_s * (1 - share) / share)}"
    return line


def emit(telemetry: Telemetry, figures: ProcessFigures) -> None:
    """Emit the figures as metrics."""
    telemetry.progress(figures.job, figures.rows_done, figures.rows_total)
    for outcome in OUTCOMES:
        telemetry.reach("sdp_process_rows_total", getattr(figures.counts, outcome), outcome=outcome)
    telemetry.reach("sdp_process_transformed_total", figures.transformed.items)
    telemetry.reach("sdp_process_encoded_total", figures.images_encoded)
    telemetry.reach("sdp_process_transform_seconds_total", figures.transformed.seconds)
    telemetry.reach("sdp_process_reading_seconds_total", figures.transformed.reading_s)
    telemetry.reach("sdp_process_encoder_busy_seconds_total", figures.busy_s)
    telemetry.reach("sdp_process_encoder_waiting_seconds_total", figures.idle_s)
    telemetry.reach("sdp_process_written_bytes_total", figures.bytes_written)
    telemetry.reach("sdp_process_deaths_total", figures.deaths)
    telemetry.show("sdp_process_encoders", figures.pipeline.workers)
    telemetry.show("sdp_process_transforms", figures.pipeline.preparing)
    telemetry.show("sdp_process_ready", figures.pipeline.ready)


def summary(
    config: AnyConfig, dataset: Dataset, figures: ProcessFigures, more: Sequence[TableLine] = ()
) -> list[TableLine]:
    """Return the closing table: the dataset's counts, `more` on its content, this run's figures, the next command."""
    counts = dataset.manifest.counts
    without = dataset.rows - counts.input
    written = f"{counts.written:,} of {counted(counts.input, 'row')}, {size(dataset.manifest.size)}"
    lines = [
        ("written", f"{written} in {config.output.uri}"),
        *((f"  {reason}", f"{count:,}") for reason, count in counts.reasons.items()),
        *([("no image", f"{without:,} of the source's {dataset.rows:,} rows")] if without > 0 else []),
        *more,
    ]
    if figures.parts_written:
        encoded = f"{counted(figures.images_encoded, 'image')} in {spent(figures.elapsed_s, figures.gpu_hours)}"
        lines += [
            ("this run", f"{encoded}, {rate(figures.rate)} img/s"),
            ("an image", size(figures.bytes_per_image)),
            ("encoders", f"{figures.encoders_most}, idle {figures.wait * 100:.0f} % of their time"),
            ("transforms", f"up to {figures.transforms_most}"),
        ]
        # A short run, or one that hardly used encoders, mostly loads, warms up and writes.
        if _STEADY_S <= figures.elapsed_s <= 2 * (figures.busy_s + figures.idle_s):
            lines.append(("bottleneck", suggestion(figures)))
        for side, count in sorted(figures.fitting.items()):
            batches = "captions" if side == TEXT else f"images of {side} px"
            advice = "" if side == TEXT else f"; set encode.batch_size to {count}"
            lines.append(("memory", f"batches of {batches} did not fit and were split to {count}{advice}"))
        if figures.deaths:
            lines.append(("replaced", f"{counted(figures.deaths, 'worker')} that died"))
    else:
        lines.append(("this run", "nothing to write: all parts existed"))
    if counts.failed:
        only_captions = counts.reasons.get("no_caption") == counts.failed
        first = "add captions to their source, or nothing will change; then " if only_captions else ""
        lines.append(("next", f"{first}{rerun(figures.job, '--only-failed')} retries the failed rows"))
    return lines


def taken_down_lines(dataset: Dataset) -> list[TableLine]:
    """Return a line on the written rows of a plain source that are taken down, if there are some."""
    count = len(tombstones.load(dataset.storage).rows) - dataset.manifest.counts.reasons.get("tombstone", 0)
    lines = [("  taken down", f"{count:,} of the written, left out of training")]
    return lines if count > 0 and not dataset.head.derived else []


def forecast(
    prepared: Prepared[Config, Spec], output: Output, to_write: Callable[[int], list[TableLine]]
) -> list[TableLine]:
    """Return the dry run's table: what a run would do; `to_write` returns the lines on this many images."""
    works, pending = output.index.works(), output.pending()
    rows = sum(len(work.unit) for work in pending)
    config = prepared.config
    node = config.encode.accelerator or "any node"
    before = " before filters" if prepared.pictures.columns.leave_out else ""
    condition = " if there are GPUs" if config.encode.gpu_each is None else ""
    return [
        ("source", f"{config.source.uri}: {prepared.pictures.size}"),
        ("output", f"{config.output.uri}: {len(works) - len(pending)} of {counted(len(works), 'part')} written"),
        ("to do", f"{counted(len(pending), 'part')}, {counted(rows, 'row')}{before}"),
        *to_write(prepared.images_of(rows)),
        ("encoders", f"{config.encode.num_workers} on {node}, 1 GPU each{condition}"),
    ]


def latents_lines(prepared: Prepared[ProcessConfig, EncodeSpec], images: int) -> list[TableLine]:
    """Return the dry run's lines on the latents to write."""
    config, model = prepared.config, prepared.spec.model
    return [
        ("to write", f"about {size(images * bytes_per_row(prepared.spec.shape))}"),
        ("model", f"{config.model.source} (sha256 {str(model.sha256)[:16]}…)"),
    ]
