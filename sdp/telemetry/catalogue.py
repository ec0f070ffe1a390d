"""Every metric that a job emits: its name, type, unit, labels and meaning.

Names follow Prometheus: base units, and `_total` for counters. Every metric also has the label `run`, the end of the
URI that the job writes to. Ray prefixes names with `ray_`; the monitoring chart removes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

COUNTER: Literal["counter"] = "counter"
GAUGE: Literal["gauge"] = "gauge"
HISTOGRAM: Literal["histogram"] = "histogram"
ACTIONS = {COUNTER: "inc", GAUGE: "set", HISTOGRAM: "observe"}
"""Method of a family, in Ray and in prometheus-client, that takes a value."""

SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
BYTES = (1e3, 1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 1e8)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """The values' unit in words; for counts, the things that are counted."""
    help: str
    labels: tuple[str, ...] = ()
    """Labels besides `run`."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


_METRICS = (
    # --- any job ---
    Metric(
        "sdp_process_info",
        GAUGE,
        "1",
        "A process of a job: 1 while it runs. Join it with the GPU exporter's series by pod and pid. job_name is the "
        "submitted job's name in Ray; empty if it was not submitted.",
        ("pid", "role", "rank", "job_name"),
    ),
    Metric("sdp_job_rows", GAUGE, "rows", "Rows of the job, including those done.", ("job",)),
    Metric("sdp_job_rows_done", GAUGE, "rows", "Rows that the job has done, whatever the outcome.", ("job",)),
    # --- download ---
    Metric(
        "sdp_download_rows_total",
        COUNTER,
        "rows",
        "Addresses done, by outcome (written, filtered, failed) and reason.",
        ("outcome", "reason"),
    ),
    Metric("sdp_download_requests_total", COUNTER, "requests", "HTTP requests sent, including retries and redirects."),
    Metric("sdp_download_fetched_bytes_total", COUNTER, "bytes", "Bytes of response bodies received."),
    Metric("sdp_download_stored_bytes_total", COUNTER, "bytes", "Bytes of images as stored."),
    Metric(
        "sdp_download_fetch_seconds",
        HISTOGRAM,
        "seconds",
        "Time from the first request for an image to its last byte, including retries.",
        bounds=SECONDS,
    ),
    Metric("sdp_download_image_bytes", HISTOGRAM, "bytes", "Sizes of the images received.", bounds=BYTES),
    # --- process ---
    Metric("sdp_process_rows_total", COUNTER, "rows", "Rows in finished parts, by outcome.", ("outcome",)),
    Metric("sdp_process_transformed_total", COUNTER, "images", "Images decoded, resized and cropped."),
    Metric("sdp_process_encoded_total", COUNTER, "images", "Images encoded; each resolution and crop counts."),
    Metric("sdp_process_transform_seconds_total", COUNTER, "seconds", "Time that transforms took, summed."),
    Metric("sdp_process_reading_seconds_total", COUNTER, "seconds", "Time that transforms waited for the source."),
    Metric("sdp_process_encoder_busy_seconds_total", COUNTER, "seconds", "Time that encoders worked, summed."),
    Metric("sdp_process_encoder_waiting_seconds_total", COUNTER, "seconds", "Time that encoders waited, summed."),
    Metric("sdp_process_written_bytes_total", COUNTER, "bytes", "Bytes of finished parts."),
    Metric("sdp_process_deaths_total", COUNTER, "processes", "Workers that died and were replaced."),
    Metric("sdp_process_encoders", GAUGE, "encoders", "Encoders that are ready."),
    Metric("sdp_process_transforms", GAUGE, "tasks", "Transforms under way."),
    Metric("sdp_process_ready", GAUGE, "pieces", "Transformed pieces that wait for an encoder."),
    # --- train ---
    Metric(
        "sdp_train_info",
        GAUGE,
        "1",
        "1; data_mode is the run's setting data.mode: offline, online or collocated.",
        ("data_mode",),
    ),
    Metric("sdp_train_step", GAUGE, "steps", "Steps taken so far in the run."),
    Metric("sdp_train_samples_seen", GAUGE, "samples", "Samples trained on so far in the run."),
    Metric("sdp_train_epoch", GAUGE, "epochs", "Passes over the data so far, including part of the current one."),
    Metric("sdp_train_samples_total", COUNTER, "samples", "Samples trained on by this job, including repeated ones."),
    Metric("sdp_train_steps_total", COUNTER, "steps", "Steps of this job, including skipped and repeated ones."),
    Metric("sdp_train_skipped_steps", GAUGE, "steps", "Steps of the run that were skipped: not finite, or a spike."),
    Metric("sdp_train_bad_rows_total", COUNTER, "rows", "Bad rows, which count for nothing in training.", ("rank",)),
    Metric("sdp_train_loss", GAUGE, "1", "The loss, averaged over the steps since the last logged line."),
    Metric("sdp_train_loss_smoothed", GAUGE, "1", "The loss, smoothed."),
    Metric(
        "sdp_train_validation_loss",
        GAUGE,
        "1",
        "The loss on held-out rows, by range of timesteps such as 0-99, and over all.",
        ("timesteps",),
    ),
    Metric("sdp_train_gradient_norm", GAUGE, "1", "The gradient's norm before clipping."),
    Metric("sdp_train_learning_rate", GAUGE, "1", "The learning rate."),
    Metric("sdp_train_samples_per_second", GAUGE, "samples/s", "Throughput since the last logged line."),
    Metric(
        "sdp_train_mfu",
        GAUGE,
        "ratio",
        "Share of the GPUs' dense bf16 peak that the U-Net's arithmetic reaches; absent for an unknown GPU.",
    ),
    Metric("sdp_train_workers", GAUGE, "workers", "Trainers."),
    Metric("sdp_train_gpu_hours", GAUGE, "hours", "GPU-hours of the run so far: trainers' and encoders'."),
    Metric("sdp_train_cost", GAUGE, "currency", "What the run has cost so far, by the configured prices."),
    Metric("sdp_train_final_cost", GAUGE, "currency", "Expected cost of all phases, at the current rate."),
    Metric(
        "sdp_train_finish_time_seconds", GAUGE, "seconds", "Unix time at which all phases end, at the current rate."
    ),
    Metric("sdp_train_checkpoint_step", GAUGE, "steps", "Step of the newest complete checkpoint."),
    Metric("sdp_train_checkpoint_time_seconds", GAUGE, "seconds", "Unix time at which it was completed."),
    Metric("sdp_train_checkpoint_seconds", GAUGE, "seconds", "Time that training stopped for the newest checkpoint."),
    Metric(
        "sdp_train_ledger_difference",
        GAUGE,
        "rows",
        "Samples that the newest checkpoint counts, minus the rows in its ledger; anything but 0 is an error.",
    ),
    Metric("sdp_train_recoveries", GAUGE, "restarts", "Times that this job's workers were restarted."),
    Metric("sdp_train_encoders", GAUGE, "encoders", "Encoders that are ready (online)."),
    Metric("sdp_train_encoders_busy", GAUGE, "ratio", "Share of the last minute that encoders worked (online)."),
    Metric("sdp_train_encoded_total", COUNTER, "images", "Images encoded for the trainers (online)."),
    Metric(
        "sdp_train_rank_seconds_total",
        COUNTER,
        "seconds",
        "Time of each trainer's steps, by part: data (waiting for it), copy, forward, backward, optimizer, checkpoint "
        "(waiting for it). The slowest trainer waits least in backward, where gradients are exchanged.",
        ("rank", "part"),
    ),
    Metric(
        "sdp_train_gpu_memory_bytes",
        GAUGE,
        "bytes",
        "GPU memory of each trainer as PyTorch counts it: allocated, reserved, or peak (the most allocated).",
        ("rank", "kind"),
    ),
    # --- generate ---
    Metric("sdp_generate_images_total", COUNTER, "images", "Pictures drawn."),
)

CATALOGUE: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
