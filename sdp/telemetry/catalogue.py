"""Every metric that a job emits: its name, type, labels and meaning.

Names follow Prometheus: base units, and `_total` for counters. Every metric also has the label `run`, the end of the
URI that the job writes to. Ray prefixes names with `ray_`; the monitoring chart removes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

COUNTER: Literal["counter"] = "counter"
GAUGE: Literal["gauge"] = "gauge"
ACTIONS = {COUNTER: "inc", GAUGE: "set"}
"""Method of a family, in Ray and in prometheus-client, that takes a value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels besides `run`."""

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        return COUNTER if self.name.endswith("_total") else GAUGE


_METRICS = (
    # --- any job ---
    Metric(
        "sdp_process_info",
        "A process of a job: 1 while it runs. Join it with the GPU exporter's series by pod and pid. job_name is the "
        "submitted job's name in Ray; empty if it was not submitted.",
        ("pid", "role", "rank", "job_name"),
    ),
    Metric("sdp_job_rows", "Rows of the job, including those done.", ("job",)),
    Metric("sdp_job_rows_done", "Rows that the job has done, whatever the outcome.", ("job",)),
    # --- download ---
    Metric(
        "sdp_download_rows_total",
        "Addresses done, by outcome (written, filtered, failed) and reason.",
        ("outcome", "reason"),
    ),
    Metric("sdp_download_requests_total", "HTTP requests sent, including retries and redirects."),
    Metric("sdp_download_fetched_bytes_total", "Bytes of response bodies received."),
    Metric("sdp_download_stored_bytes_total", "Bytes of images as stored."),
    Metric("sdp_download_fetch_seconds_total", "Time from each image's first request to its last byte, summed."),
    # --- process ---
    Metric("sdp_process_rows_total", "Rows in finished parts, by outcome.", ("outcome",)),
    Metric("sdp_process_transformed_total", "Images decoded, resized and cropped."),
    Metric("sdp_process_encoded_total", "Images encoded; each resolution and crop counts."),
    Metric("sdp_process_transform_seconds_total", "Time that transforms took, summed."),
    Metric("sdp_process_reading_seconds_total", "Time that transforms waited for the source."),
    Metric("sdp_process_encoder_busy_seconds_total", "Time that encoders worked, summed."),
    Metric("sdp_process_encoder_waiting_seconds_total", "Time that encoders waited, summed."),
    Metric("sdp_process_written_bytes_total", "Bytes of finished parts."),
    Metric("sdp_process_deaths_total", "Workers that died and were replaced."),
    Metric("sdp_process_encoders", "Encoders that are ready."),
    Metric("sdp_process_transforms", "Transforms under way."),
    Metric("sdp_process_ready", "Transformed pieces that wait for an encoder."),
    # --- train ---
    Metric(
        "sdp_train_info", "1; data_mode is the run's setting data.mode: offline, online or collocated.", ("data_mode",)
    ),
    Metric("sdp_train_step", "Steps taken so far in the run."),
    Metric("sdp_train_samples_seen", "Samples trained on so far in the run."),
    Metric("sdp_train_epoch", "Passes over the data so far, including part of the current one."),
    Metric("sdp_train_samples_total", "Samples trained on by this job, including repeated ones."),
    Metric("sdp_train_steps_total", "Steps of this job, including skipped and repeated ones."),
    Metric("sdp_train_skipped_steps", "Steps of the run that were skipped: not finite."),
    Metric("sdp_train_bad_rows_total", "Bad rows, which count for nothing in training.", ("rank",)),
    Metric("sdp_train_loss", "The loss, averaged over the steps since the last logged line."),
    Metric("sdp_train_loss_smoothed", "The loss, smoothed."),
    Metric(
        "sdp_train_validation_loss",
        "The loss on held-out rows, by range of timesteps such as 0-99, and over all.",
        ("timesteps",),
    ),
    Metric("sdp_train_gradient_norm", "The gradient's norm before clipping."),
    Metric("sdp_train_learning_rate", "The learning rate."),
    Metric(
        "sdp_train_mfu",
        "Share of the GPUs' dense bf16 peak that the U-Net's arithmetic reaches; absent for an unknown GPU.",
    ),
    Metric("sdp_train_workers", "Trainers."),
    Metric("sdp_train_gpu_hours", "GPU-hours of the run so far: trainers' and encoders'."),
    Metric("sdp_train_cost", "What the run has cost so far, by the configured prices."),
    Metric("sdp_train_finish_time_seconds", "Unix time at which all phases end, at the current rate."),
    Metric("sdp_train_checkpoint_step", "Step of the newest complete checkpoint."),
    Metric("sdp_train_checkpoint_time_seconds", "Unix time at which it was completed."),
    Metric("sdp_train_checkpoint_seconds", "Time that training stopped for the newest checkpoint."),
    Metric(
        "sdp_train_ledger_difference",
        "Samples that the newest checkpoint counts, minus the rows in its ledger; anything but 0 is an error.",
    ),
    Metric("sdp_train_recoveries", "Times that this job's workers were restarted."),
    Metric("sdp_train_encoders", "Encoders that are ready (online)."),
    Metric("sdp_train_encoders_busy", "Share of the last minute that encoders worked (online)."),
    Metric("sdp_train_encoded_total", "Images encoded for the trainers (online)."),
    Metric(
        "sdp_train_rank_seconds_total",
        "Time of each trainer's steps, by part: data (waiting for it), encode (collocated), copy, forward, backward, "
        "optimizer, checkpoint (waiting for it). The slowest trainer waits least in backward, where gradients are "
        "exchanged.",
        ("rank", "part"),
    ),
    Metric(
        "sdp_train_gpu_memory_bytes",
        "GPU memory of each trainer as PyTorch counts it: allocated, reserved, or peak (the most allocated).",
        ("rank", "kind"),
    ),
    # --- generate ---
    Metric("sdp_generate_images_total", "Pictures drawn."),
)

CATALOGUE: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
