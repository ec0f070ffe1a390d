"""Every metric that a job emits: its name, type, labels and meaning.

Names follow Prometheus: base units, and `_total` for counters. Every metric also has the label `run`, the end of the
URI that the job writes to. Ray prefixes names with `ray_`; the monitoring chart removes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


_METRICS = {
    # --- any job ---
    "sdp_process_info{pid,role,rank,job_name}": (
        "A process of a job: 1 while it runs. Join it with the GPU exporter's series by pod and pid. job_name is the "
        "submitted job's name in Ray; empty if it was not submitted."
    ),
    "sdp_job_rows{job}": "Rows of the job, including those done.",
    "sdp_job_rows_done{job}": "Rows that the job has done, whatever the outcome.",
    # --- download ---
    "sdp_download_rows_total{outcome,reason}": "Addresses done, by outcome (written, filtered, failed) and reason.",
    "sdp_download_requests_total": "HTTP requests sent, including retries and redirects.",
    "sdp_download_fetched_bytes_total": "Bytes of response bodies received.",
    "sdp_download_stored_bytes_total": "Bytes of images as stored.",
    "sdp_download_fetch_seconds_total": "Time from each image's first request to its last byte, summed.",
    # --- process ---
    "sdp_process_rows_total{outcome}": "Rows in finished parts, by outcome.",
    "sdp_process_transformed_total": "Images decoded, resized and cropped.",
    "sdp_process_encoded_total": "Images encoded; each resolution and crop counts.",
    "sdp_process_transform_seconds_total": "Time that transforms took, summed.",
    "sdp_process_reading_seconds_total": "Time that transforms waited for the source.",
    "sdp_process_encoder_busy_seconds_total": "Time that encoders worked, summed.",
    "sdp_process_encoder_waiting_seconds_total": "Time that encoders waited, summed.",
    "sdp_process_written_bytes_total": "Bytes of finished parts.",
    "sdp_process_deaths_total": "Workers that died and were replaced.",
    "sdp_process_encoders": "Encoders that are ready.",
    "sdp_process_transforms": "Transforms under way.",
    "sdp_process_ready": "Transformed pieces that wait for an encoder.",
    # --- train ---
    "sdp_train_info{data_mode}": "1; data_mode is the run's setting data.mode: offline, online or collocated.",
    "sdp_train_step": "Steps taken so far in the run.",
    "sdp_train_samples_seen": "Samples trained on so far in the run.",
    "sdp_train_epoch": "Passes over the data so far, including part of the current one.",
    "sdp_train_samples_total": "Samples trained on by this job, including repeated ones.",
    "sdp_train_steps_total": "Steps of this job, including skipped and repeated ones.",
    "sdp_train_skipped_steps": "Steps of the run that were skipped: not finite.",
    "sdp_train_bad_rows_total{rank}": "Bad rows, which count for nothing in training.",
    "sdp_train_loss": "The loss, averaged over the steps since the last logged line.",
    "sdp_train_loss_smoothed": "The loss, smoothed.",
    "sdp_train_validation_loss{timesteps}": (
        "The loss on held-out rows, by range of timesteps such as 0-99, and over all."
    ),
    "sdp_train_gradient_norm": "The gradient's norm before clipping.",
    "sdp_train_learning_rate": "The learning rate.",
    "sdp_train_mfu": (
        "Share of the GPUs' dense bf16 peak that the U-Net's arithmetic reaches; absent for an unknown GPU."
    ),
    "sdp_train_workers": "Trainers.",
    "sdp_train_gpu_hours": "GPU-hours of the run so far: trainers' and encoders'.",
    "sdp_train_cost": "What the run has cost so far, by the configured prices.",
    "sdp_train_finish_time_seconds": "Unix time at which all phases end, at the current rate.",
    "sdp_train_checkpoint_step": "Step of the newest complete checkpoint.",
    "sdp_train_checkpoint_time_seconds": "Unix time at which it was completed.",
    "sdp_train_checkpoint_seconds": "Time that training stopped for the newest checkpoint.",
    "sdp_train_ledger_difference": (
        "Samples that the newest checkpoint counts, minus the rows in its ledger; anything but 0 is an error."
    ),
    "sdp_train_recoveries": "Times that this job's workers were restarted.",
    "sdp_train_encoders": "Encoders that are ready (online).",
    "sdp_train_encoders_busy": "Share of the last minute that encoders worked (online).",
    "sdp_train_encoded_total": "Images encoded for the trainers (online).",
    "sdp_train_rank_seconds_total{rank,part}": (
        "Time of each trainer's steps, by part: data (waiting for it), encode (collocated), copy, forward, backward, "
        "optimizer, checkpoint (waiting for it). The slowest trainer waits least in backward, where gradients are "
        "exchanged."
    ),
    "sdp_train_gpu_memory_bytes{rank,kind}": (
        "GPU memory of each trainer as PyTorch counts it: allocated, reserved, or peak (the most allocated)."
    ),
    # --- generate ---
    "sdp_generate_images_total": "Pictures drawn.",
}
"""The help of each metric, by its name and its labels besides `run`."""


def _metric(series: str, text: str) -> Metric:
    name, _, labels = series.partition("{")
    return Metric(name, text, tuple(labels.rstrip("}").split(",")) if labels else ())


CATALOGUE: Mapping[str, Metric] = {metric.name: metric for metric in map(_metric, _METRICS, _METRICS.values())}
