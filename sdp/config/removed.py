"""Keys and sections that earlier versions had, and what happens now without them."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from sdp.config.base import Section
from sdp.config.jobs import JOBS

SINCE = "0.3"
REMOVED: Mapping[str, str] = {
    "evaluate: fid": "FID is not extrapolated",
    "evaluate: output.rows_per_file": "features are not stored",
    "evaluate: features.resize": "Inception resizes as the original FID does",
    "train: optimizer.kind": "AdamW keeps its moments in fp32",
    "dreambooth: optimizer": "AdamW keeps its moments in fp32",
    "train: strategy.fp8": "linear layers compute in the precision of the others",
    "download: fetch.connect_timeout_s fetch.first_byte_timeout_s": "a twelfth and a sixth of fetch.timeout_s",
    "download: fetch.longest_wait_s": "a Retry-After of up to a minute is waited for",
    "download: fetch.max_redirects": "5 redirects are followed",
    "download: fetch.buffer_mb workers.units_at_once": "a worker buffers 256 MB and fills 2 parts at once",
    "download: workers.decoder_memory_mb": "an image may take 4 GB to decode",
    "download: fetch.allow_private": "fetch.allow_networks names private networks; [0.0.0.0/0, ::/0] are all",
    "download: fetch.ca_file": "the environment's SSL_CERT_FILE names it",
    "download: hosts.give_up_after": "a host is left alone after 20 failed connections in a row",
    "download: hosts.count": "hosts are always counted",
    "download: image.least_side": "an image with a side below 8 pixels fails",
    "download: filters.min_similarity filters.max_punsafe filters.max_pwatermark filters.min_aesthetic "
    "filters.keep_unknown filters.similarity_column filters.punsafe_column filters.pwatermark_column "
    "filters.aesthetic_column": "filters.columns has bounds of any column: {punsafe: {max: 0.1}}",
    "storage.retries storage.timeout_s": "an operation is retried for two minutes; 5 times if the store never answered",
    "score process train: encode.use_gpu": "encode.accelerator is a type of GPU, gpu or cpu",
    "train generate evaluate dreambooth: scaling.use_gpu": "scaling.accelerator is a type of GPU, gpu or cpu",
    "train: optimizer.beta1 optimizer.epsilon": "0.9 and 1e-8, AdamW's usual ones",
    "train: max_samples": "max_steps times the global batch",
    "train: samples.guidance_scale": "samples follow the prompt with 7.5",
    "process train: transform.max_upscale": "images that need to be enlarged more than twice fail as too small",
    "train: strategy.half_gradients": "ddp sums gradients in fp32",
    "train: prices.trainer_instance prices.encoder_instance": "prices.trainer_hour and encoder_hour take a type",
    "download: filters.width_column filters.height_column": "filters.size_columns names both",
    "score: encode.compile": "CLIP is not compiled",
    "download: image.tiff": "TIFF is not read",
    "download: fetch.opt_out_agent": "the first word of fetch.user_agent",
    "evaluate: reference.limit": "all pictures of the reference are read",
    "dreambooth: prior.weight": "subject and class count alike",
    "dreambooth: draw.images_per_prompt draw.steps draw.guidance_scale": "4 pictures a prompt, by sdp generate",
    "score process train: transform.max_pixels": "images of more than 100 megapixels fail",
    "score process train: transform.concurrency": "as many transforms run as the CPUs allow",
    "process train: transform.oversample": "a JPEG is decoded to at least the size of its crop",
    "process: output.target_bytes": "a part has 256 MB, or output.rows_per_file",
    "score process train: encode.gpus_per_worker": "an encoder has one GPU",
    "score process train: encode.channels_last": "images are channels-last",
    "train: data.shuffle": "16 lanes; 4 parts and 4 row groups are mixed",
    "train: data.ahead": "4 batches are prepared ahead of need",
    "train: guard.bad_steps": "20 bad steps in a row stop the job",
    "train: checkpoint.keep_best": "the newest checkpoints and those of keep_every are kept",
    "train: evaluate.buckets": "the loss is measured in 10 ranges of timesteps",
    "train: samples.share samples.batch_size": "4 pictures are drawn at once, while training waits",
    "train: profile.start": "the first 10 steps are not profiled",
    "train: log.metrics_port": "training without Ray serves no metrics; log.tensorboard writes them",
    "train: watchdog_s": "half an hour before the first step, ten minutes between later ones",
    "train: model.start_optimizer phase_2.keep_optimizer": "a run begins with new moments of AdamW",
    "train dreambooth: lora.text_targets": "all attention of a trained text encoder",
    "dreambooth: lora.alpha lora.targets": "alpha is the rank, and all attention gets a LoRA",
    "evaluate: reference.caption_column": "captions of the reference are not read",
    "evaluate: kid seed": "KID is the mean of 100 subsets of 1000 pictures",
    "evaluate: loss.resolution loss.buckets loss.batch_size": "that of training, 10 ranges, 32 rows at once",
    "evaluate: scaling.batch_size scaling.threads": "64 pictures at once, fewer where memory is short; 4 threads",
    "generate: output.sheet_prompts": "sdp report shows the pictures, no contact sheet is written",
    "train dreambooth: scaling.gpus_per_worker": "a trainer has one GPU; activation_checkpointing saves memory",
    "download: image.max_pixels": "images of more than 100 megapixels fail",
    "train: phase_2.learning_rate phase_2.warmup_steps": "those of optimizer hold in both phases",
}
"""Lines on what happens now, by `JOBS: KEYS`, or by `KEYS` of every job; docs/upgrading.md lists the same."""

FIXED: Mapping[str, Any] = {
    "data.shuffle.lanes": 16,
    "data.shuffle.units": 4,
    "data.shuffle.row_groups": 4,
    "optimizer.kind": "adamw",
    "model.start_optimizer": False,
    "phase_2.keep_optimizer": False,
    "lora.text_targets": ["q_proj", "k_proj", "v_proj", "out_proj"],
    "image.least_side": 8,
    "image.max_pixels": 100_000_000,
    "transform.max_pixels": 100_000_000,
    "transform.oversample": 1.0,
    "transform.max_upscale": 2.0,
    "optimizer.beta1": 0.9,
    "optimizer.epsilon": 1e-8,
    "image.tiff": False,
    "fetch.opt_out_agent": "sdp",
    "prior.weight": 1.0,
    "filters.width_column": None,
    "filters.height_column": None,
    **{f"filters.{name}": None for name in ("min_similarity", "max_punsafe", "max_pwatermark", "min_aesthetic")},
}
"""Values now of removed keys that decided an output's content."""


def removed(path: str, model: type[Section]) -> str | None:
    """Return what to say of a key that an earlier version had; None if none had it."""
    job = next((name for name, config in JOBS.items() if config is model), "")
    lines = (line for old, line in _removed_of(job) if f"{path}.".startswith(f"{old}."))
    return next((f"remove it: gone since {SINCE}: {line}" for line in lines), None)


def without_removed(job: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that an earlier version saved, without the keys that are gone."""
    values = deepcopy(dict(saved))
    for path, _ in _removed_of(job):
        *parents, name = path.split(".")
        section: Any = values
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(name, None)
    return values


def fixed_since(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of an identity's keys that are gone and had another value than the output would get now."""
    return {path: identity[path] for path, value in FIXED.items() if path in identity and identity[path] != value}


def _removed_of(job: str) -> Iterator[tuple[str, str]]:
    for names, line in REMOVED.items():
        owners, colon, paths = names.rpartition(": ")
        if not colon or job in owners.split():
            yield from ((path, line) for path in paths.split())
