"""What a person sees of a run: before, during and after it."""

from collections.abc import Sequence
from typing import TypedDict

from sdp.config import ProcessConfig
from sdp.console import duration, size
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN
from sdp.datasets.output import Output
from sdp.encode.recipe import TEXT
from sdp.encode.table import bytes_per_row
from sdp.model.family import SD2, caption_bytes
from sdp.process.figures import Figures, suggestion
from sdp.process.prepare import Prepared
from sdp.telemetry import Telemetry


def progress_line(figures: Figures, recent: Sequence[tuple[float, int, int]]) -> str:
    """Where a run is, how fast, and what holds it up."""
    (since, transformed, encoded), (now, transformed_now, encoded_now) = recent[0], recent[-1]
    passed = max(now - since, 1e-9)
    rate = (encoded_now - encoded) / passed
    line = (
        f"{figures.rows_done:,} of {figures.rows_total:,} rows · encode {rate:.0f} img/s · "
        f"transform {(transformed_now - transformed) / passed:.0f} img/s · encoders wait {figures.wait * 100:.0f} %"
    )
    if figures.written:
        line += f" · {size(figures.bytes_per_image)} an image"
    if figures.deaths:
        line += f" · {figures.deaths} workers replaced"
    share = _share_done(figures)
    if 0.01 < share < 1:
        line += f" · ETA {duration(figures.elapsed_s * (1 - share) / share)}"
    return line


def _share_done(figures: Figures) -> float:
    """By images, which are finer than parts; by rows, where many of them turned out to be no images."""
    images = figures.images_encoded / figures.images_total if figures.images_total else 0.0
    rows = figures.rows_done / figures.rows_total if figures.rows_total else 0.0
    return max(images, rows)


def emit(telemetry: Telemetry, figures: Figures) -> None:
    """The same as metrics."""
    telemetry.show("sdp_job_rows", figures.rows_total, job="process")
    telemetry.show("sdp_job_rows_done", figures.rows_done, job="process")
    for outcome, count in ((WRITTEN, figures.written), (FILTERED, figures.filtered), (FAILED, figures.failed)):
        telemetry.reach("sdp_process_rows_total", count, outcome=outcome)
    telemetry.reach("sdp_process_transformed_total", figures.images_transformed)
    telemetry.reach("sdp_process_encoded_total", figures.images_encoded)
    telemetry.reach("sdp_process_transform_seconds_total", figures.transform_s)
    telemetry.reach("sdp_process_reading_seconds_total", figures.reading_s)
    telemetry.reach("sdp_process_encoder_busy_seconds_total", figures.busy_s)
    telemetry.reach("sdp_process_encoder_waiting_seconds_total", figures.idle_s)
    telemetry.reach("sdp_process_written_bytes_total", figures.bytes_written)
    telemetry.reach("sdp_process_deaths_total", figures.deaths)
    telemetry.show("sdp_process_encoders", figures.encoders)
    telemetry.show("sdp_process_transforms", figures.transforms)
    telemetry.show("sdp_process_ready", figures.ready)


class Spent(TypedDict):
    """What the record of a run is told besides its parts."""

    work: dict[str, dict[str, float]]
    workers: dict[str, int]
    replaced: int


def spent(figures: Figures) -> Spent:
    """Where a run's time went, and who worked."""
    return {
        "work": {
            "encoders": {"at work": figures.busy_s, "waiting for input": figures.idle_s},
            "transforms": {"reading": figures.reading_s, "transforming": figures.transform_s},
        },
        "workers": {"encoders": figures.encoders_most, "transforms": figures.transforms_most},
        "replaced": figures.deaths,
    }


def summary(config: ProcessConfig, dataset: Dataset, figures: Figures) -> list[tuple[str, str]]:
    """The closing summary: what there is now, what this run did, what to do next."""
    counts = dataset.manifest.counts
    lines: list[tuple[str, str]] = [
        (
            "written",
            f"{counts.written:,} of {counts.input:,} rows, {size(dataset.manifest.size)} in {config.output.uri}",
        ),
        *((f"  {reason}", f"{count:,}") for reason, count in counts.reasons.items()),
        ("captions", _captions(config, counts.written)),
    ]
    if figures.parts_written:
        rate = figures.images_encoded / max(figures.elapsed_s, 1e-9)
        lines += [
            ("this run", f"{figures.images_encoded:,} images in {duration(figures.elapsed_s)}, {rate:.0f} img/s"),
            *([("GPU-hours", f"{gpu_hours:,.2f}")] if (gpu_hours := _gpu_hours(config, figures)) else []),
            ("an image", size(figures.bytes_per_image)),
            ("encoders", f"{figures.encoders_most}, waiting {figures.wait * 100:.0f} % of their time"),
            ("transforms", f"up to {figures.transforms_most}, {_per_core(figures)}"),
            ("bottleneck", suggestion(figures, config.transform.concurrency)),
        ]
        for what, count in sorted(figures.fitting.items()):
            batches = "captions" if what == TEXT else f"images of {what} px"
            then = "" if what == TEXT else "; set encode.batch_size to what fits"
            lines.append(("memory", f"batches of {batches} were too large and were split to {count}{then}"))
        if figures.deaths:
            lines.append(("replaced", f"{figures.deaths} workers that died"))
    else:
        lines.append(("this run", "nothing to do: every part was there"))
    if counts.failed:
        lines.append(("next", "sdp process --only-failed tries the failed rows again"))
    return lines


def _gpu_hours(config: ProcessConfig, figures: Figures) -> float:
    """Return the GPU-hours of the encoders, at work or waiting."""
    return bool(config.encode.gpu_each) * config.encode.gpus_per_worker * (figures.busy_s + figures.idle_s) / 3600


def _captions(config: ProcessConfig, rows: int) -> str:
    """Return what captions cost as they are stored, and the other way; with Stable Diffusion 2's text encoder."""
    ids, embeddings = (
        f"{a_row:,} bytes each, {size(rows * a_row)}"
        for a_row in map(caption_bytes, (None, SD2.text_encoder["hidden_size"]))
    )
    # 45 of 45 + 539 GFLOP; an A100 trained on 184.6 images a second at best without the text encoder.
    work = "45 of 584 GFLOP a sample at 256 px, 0.13 A100-hours a million samples"
    if config.encode.text == "text_embedding":
        return f"as embeddings, {embeddings}: training runs no text encoder, {work}; token ids take {ids}"
    return f"as token ids, {ids}: training runs the text encoder, {work}; embeddings (SD2's) take {embeddings}"


def _per_core(figures: Figures) -> str:
    busy = figures.transform_s + figures.reading_s
    return f"{figures.images_transformed / busy:.0f} img/s each" if busy else "idle"


def forecast(prepared: Prepared, output: Output) -> list[tuple[str, str]]:
    """What a run would do."""
    works, pending = output.index.works(), output.pending()
    rows = sum(len(work.unit) for work in pending)
    config = prepared.config
    on = config.encode.accelerator or "any node"
    lines = [
        ("source", f"{config.source.uri}: {prepared.pictures.size}"),
        ("output", f"{config.output.uri}: {len(works) - len(pending)} of {len(works)} parts are there"),
        ("to do", f"{len(pending)} parts of up to {output.head.unit_rows:,} rows, {rows:,} rows in all"),
        ("to write", f"about {size(prepared.images_of(rows) * bytes_per_row(prepared.orders.shape))}"),
        ("captions", _captions(config, prepared.images_of(rows))),
        ("model", f"{config.model.source} (sha256 {prepared.digest[:16]}…)"),
        (
            "encoders",
            f"{config.encode.num_workers} on {on}, {config.encode.gpus_per_worker:g} GPU each where there are any",
        ),
    ]
    planner = prepared.pictures.planner(output, prepared.piece_rows, prepared.options)
    if pending and sum(piece.reads - piece.take for piece in planner(pending[0])):
        lines.append(("beware", "row groups are larger than a piece, and are read several times: write smaller ones"))
    return lines
