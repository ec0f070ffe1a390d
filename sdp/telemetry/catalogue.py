"""Every metric that a job emits: its name, type, unit, labels and meaning.

Names are Prometheus' way: base units, `_total` on what only grows. Each metric has the label `run` besides its own, the
end of the address that the job writes to. Ray puts `ray_` before the names; the monitoring chart takes it away again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

COUNTER: Literal["counter"] = "counter"
GAUGE: Literal["gauge"] = "gauge"
HISTOGRAM: Literal["histogram"] = "histogram"

SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
BYTES = (1e3, 1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 1e8)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """Of its values, in words; a number of things is that of `unit`."""
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run`."""
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets."""


_METRICS = (
    # --- any job ---
    Metric(
        "sdp_process_info",
        GAUGE,
        "1",
        "A process of a job: 1 while it runs. Joined with the GPU exporter's series by its pod and pid. job_name is "
        "the name that Ray knows the submitted job by; empty where nobody has submitted it.",
        ("pid", "role", "rank", "job_name"),
    ),
    Metric("sdp_job_rows", GAUGE, "rows", "Rows that the job has before it, done ones included.", ("job",)),
    Metric("sdp_job_rows_done", GAUGE, "rows", "Rows that the job has done with, whatever became of them.", ("job",)),
    # --- download ---
    Metric(
        "sdp_download_rows_total",
        COUNTER,
        "rows",
        "Addresses done with, by outcome (written, filtered, failed) and reason.",
        ("outcome", "reason"),
    ),
    Metric("sdp_download_requests_total", COUNTER, "requests", "HTTP requests sent, retries and redirects included."),
    Metric("sdp_download_fetched_bytes_total", COUNTER, "bytes", "Bytes of bodies received."),
    Metric("sdp_download_stored_bytes_total", COUNTER, "bytes", "Bytes of images as they were stored."),
    Metric(
        "sdp_download_fetch_seconds",
        HISTOGRAM,
        "seconds",
        "From the first request for an image to its last byte, retries included.",
        bounds=SECONDS,
    ),
    Metric("sdp_download_image_bytes", HISTOGRAM, "bytes", "Sizes of the images received.", bounds=BYTES),
    # --- process ---
    Metric(
        "sdp_process_rows_total",
        COUNTER,
        "rows",
        "Rows done with and in a finished part, by outcome.",
        ("outcome",),
    ),
    Metric("sdp_process_transformed_total", COUNTER, "images", "Images decoded, resized and cropped."),
    Metric("sdp_process_encoded_total", COUNTER, "images", "Images encoded, each resolution and crop counted."),
    Metric("sdp_process_transform_seconds_total", COUNTER, "seconds", "Time that transforms took, one after another."),
    Metric("sdp_process_reading_seconds_total", COUNTER, "seconds", "Time that transforms waited for the source."),
    Metric("sdp_process_encoder_busy_seconds_total", COUNTER, "seconds", "Time in which encoders encoded, all added."),
    Metric("sdp_process_encoder_waiting_seconds_total", COUNTER, "seconds", "Time in which encoders had no input."),
    Metric("sdp_process_written_bytes_total", COUNTER, "bytes", "Bytes of finished parts."),
    Metric("sdp_process_deaths_total", COUNTER, "processes", "Workers that died and were replaced."),
    Metric("sdp_process_encoders", GAUGE, "encoders", "Encoders that are ready."),
    Metric("sdp_process_transforms", GAUGE, "tasks", "Transforms that run at this moment."),
    Metric("sdp_process_ready", GAUGE, "pieces", "Transformed pieces that wait for an encoder."),
    # --- train ---
    Metric(
        "sdp_train_info",
        GAUGE,
        "1",
        "1; how the run gets its data: offline, online or collocated, as data.mode has it.",
        ("data_mode",),
    ),
    Metric("sdp_train_step", GAUGE, "steps", "Steps taken so far in the run."),
    Metric("sdp_train_samples_seen", GAUGE, "samples", "Samples trained on so far in the run."),
    Metric("sdp_train_epoch", GAUGE, "epochs", "Passes over the data so far, with the share of the one under way."),
    Metric("sdp_train_samples_total", COUNTER, "samples", "Samples trained on by this job, those done again included."),
    Metric("sdp_train_steps_total", COUNTER, "steps", "Steps of this job, skipped ones and those done again included."),
    Metric("sdp_train_skipped_steps", GAUGE, "steps", "Steps of the run that were skipped: not finite, or spikes."),
    Metric("sdp_train_bad_rows_total", COUNTER, "rows", "Rows that turned out bad and counted for nothing.", ("rank",)),
    Metric("sdp_train_loss", GAUGE, "1", "The loss, over the steps since the last line of the metrics."),
    Metric("sdp_train_loss_smoothed", GAUGE, "1", "The loss, smoothed."),
    Metric(
        "sdp_train_validation_loss",
        GAUGE,
        "1",
        "The loss on rows that are not trained on, by range of timesteps, such as 0-99; and of all.",
        ("timesteps",),
    ),
    Metric("sdp_train_gradient_norm", GAUGE, "1", "The gradient's norm before clipping."),
    Metric("sdp_train_learning_rate", GAUGE, "1", "The learning rate."),
    Metric("sdp_train_samples_per_second", GAUGE, "samples/s", "Throughput since the last line of the metrics."),
    Metric(
        "sdp_train_mfu",
        GAUGE,
        "ratio",
        "Share of the GPUs' dense bf16 peak that the U-Net's arithmetic reached; absent where the GPU is not known.",
    ),
    Metric("sdp_train_workers", GAUGE, "workers", "Trainers."),
    Metric("sdp_train_gpu_hours", GAUGE, "hours", "GPU-hours of the run so far: trainers' and encoders'."),
    Metric("sdp_train_cost", GAUGE, "currency", "What the run has cost so far, by the configured prices."),
    Metric("sdp_train_final_cost", GAUGE, "currency", "What it will have cost at its end, at the pace of now."),
    Metric("sdp_train_finish_time_seconds", GAUGE, "seconds", "When it ends at the pace of now, in Unix time."),
    Metric("sdp_train_checkpoint_step", GAUGE, "steps", "Step of the newest complete checkpoint."),
    Metric("sdp_train_checkpoint_time_seconds", GAUGE, "seconds", "When it was completed, in Unix time."),
    Metric("sdp_train_checkpoint_seconds", GAUGE, "seconds", "How long training stood still for it."),
    Metric(
        "sdp_train_ledger_difference",
        GAUGE,
        "rows",
        "Samples that the newest checkpoint counts less the rows that its ledger holds: anything but 0 is an error.",
    ),
    Metric("sdp_train_recoveries", GAUGE, "restarts", "Times that this job's workers were started again."),
    Metric("sdp_train_encoders", GAUGE, "encoders", "Encoders that are ready (online)."),
    Metric("sdp_train_encoders_busy", GAUGE, "ratio", "Share of the last minute in which encoders encoded (online)."),
    Metric("sdp_train_encoded_total", COUNTER, "images", "Images encoded for the trainers (online)."),
    Metric(
        "sdp_train_rank_seconds_total",
        COUNTER,
        "seconds",
        "Time in steps of each trainer, by part: data (the wait for it), copy, forward, backward, optimizer or "
        "checkpoint (standing still for it). "
        "The slowest trainer waits least in backward, where gradients meet.",
        ("rank", "part"),
    ),
    Metric(
        "sdp_train_gpu_memory_bytes",
        GAUGE,
        "bytes",
        "GPU memory of each trainer as PyTorch counts it: allocated, reserved, or peak (of what was allocated).",
        ("rank", "kind"),
    ),
    # --- generate ---
    Metric("sdp_generate_images_total", COUNTER, "images", "Pictures drawn."),
)

CATALOGUE: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
