"""The plan of a configured job: its stages with their hours and cost, for each way to feed the trainers."""

import math
import re
from dataclasses import dataclass, replace

from sdp.config import JobConfig, ProcessConfig, TrainConfig
from sdp.errors import UserError
from sdp.hardware import INSTANCES, Instance, gpus_by_accelerator
from sdp.model.family import SD2, caption_bytes, latent_shape
from sdp.plan.model import InstanceGroup, Plan, Stage, encoders_needed, stage
from sdp.plan.prices import Prices, instances, reference
from sdp.plan.speeds import Speeds, unet_flops

MODES = ("offline", "online", "collocated")
_HOSTS = 10
"""Instances that download, as many as in the published figure."""
_PROCESS_GPUS = 40
"""Default number of encoders in an offline pass, as published. The pass costs the same with any number."""
_GROUP = re.compile(r"(?:(\d{1,4})x)?([a-z0-9-]+\.[a-z0-9]+)", re.ASCII)
_LATENT_BYTES = 2 * math.prod(latent_shape(64)) / 64**2
"""Bytes of an fp16 latent for each pixel of its image."""
_TOKEN_BYTES, _EMBEDDING_BYTES = caption_bytes(None), caption_bytes(SD2.text_encoder["hidden_size"])
"""Bytes of a caption, as token ids and as fp16 embeddings."""
_CHECKPOINT_GB = 4 * 4 * SD2.parameters["unet"] / 1e9
"""Size of a checkpoint: four fp32 copies of the U-Net's parameters (weights, average, AdamW's two)."""
_MONTH_H = 730.0


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    resolution: int
    samples: int


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's choices; None takes the configuration's."""

    trainers: str | None = None
    encoders: str | None = None
    rows: int | None = None
    terms: str = "on-demand"
    have: str = "images"
    """The data that storage already holds: nothing, images or latents."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job: its images, its phases and the instances that do it."""

    phases: tuple[Phase, ...]
    rows: int
    """Images to download and to process."""
    mode: str
    trainers: Instance
    trainer_count: int
    """Instances that train."""
    trainer_gpus: int
    """Trainers, each with the U-Net on one GPU."""
    encoders: Instance
    encoder_gpus: int | None
    """None stands for as many as the trainers need, or the published number in an offline pass."""
    options: Options
    checkpoints: int = 0
    """Checkpoints that are kept."""
    gpus_each: int = 1
    """GPUs of one trainer."""
    rows_assumed: bool = False
    """True if the number of images is unknown, so that one is assumed for each training sample."""


# --- from a configuration --------------------------------------------------------------------------------------------


def work_of(config: JobConfig, prices: Prices, options: Options) -> PlannedJob:
    """Return the work that a configuration describes."""
    if isinstance(config, TrainConfig):
        return _training_work(config, prices, options)
    encode = config.encode if isinstance(config, ProcessConfig) else None
    rows = options.rows or config.limit
    if rows is None:
        raise UserError("plan: expected the number of images, got none; give --rows or set limit")
    instance, count = _encoders(encode.accelerator if encode else None, prices, options)
    return PlannedJob(
        tuple(Phase("", side, 0) for side in (config.resolutions if isinstance(config, ProcessConfig) else ())),
        rows,
        mode="offline",
        trainers=instance,
        trainer_count=0,
        trainer_gpus=0,
        encoders=instance,
        encoder_gpus=count or (encode.most if encode else None),
        options=replace(options, have="images" if encode else "nothing"),
    )


def _training_work(config: TrainConfig, prices: Prices, options: Options) -> PlannedJob:
    trainers, gpus = _trainers(config, prices, options)
    encoders, count = _encoders(config.encode.accelerator, prices, options)
    rows = options.rows or config.limit
    names = ("train",) if len(config.phases) == 1 else ("phase 1", "phase 2")
    phases = tuple(
        Phase(name, phase.data.resolution, _samples(phase, gpus, rows))
        for name, phase in zip(names, config.phases, strict=True)
    )
    return PlannedJob(
        phases,
        rows=rows or phases[0].samples,
        rows_assumed=not rows,
        mode=config.data.mode,
        trainers=trainers,
        trainer_count=instances(gpus, config.scaling.gpus_per_worker, trainers),
        trainer_gpus=gpus,
        encoders=encoders,
        encoder_gpus=count or (config.encode.most if config.data.mode == "online" else None),
        options=options,
        checkpoints=config.checkpoint.keep_last,
        gpus_each=config.scaling.gpus_per_worker,
    )


def _samples(config: TrainConfig, gpus: int, rows: int | None) -> int:
    epochs = config.max_epochs * rows if config.max_epochs and rows else None
    limits = [config.max_steps and config.max_steps * config.data.batch_of(gpus), config.max_samples, epochs]
    if not any(limits):
        raise UserError("plan: expected an end that can be counted, got max_epochs of unknown data; give --rows")
    return min(limit for limit in limits if limit)


def _trainers(config: TrainConfig, prices: Prices, options: Options) -> tuple[Instance, int]:
    """Return the trainers' instance type and the number of GPUs."""
    if options.trainers is None:
        accelerator, gpus_each = config.scaling.accelerator or "A100", config.scaling.gpus_per_worker
        workers = config.scaling.most
        return _instance(accelerator, prices, options.terms, "--trainers", workers, gpus_each), workers
    instance, count = _group("--trainers", options.trainers)
    if instance.gpus < config.scaling.gpus_per_worker:
        raise UserError(
            f"plan: --trainers: expected an instance of {config.scaling.gpus_per_worker} GPUs or more "
            f"(scaling.gpus_per_worker), got {instance.name}, which has {instance.gpus}"
        )
    return instance, count * (instance.gpus // config.scaling.gpus_per_worker) if count else config.scaling.most


def _encoders(accelerator: str | None, prices: Prices, options: Options) -> tuple[Instance, int | None]:
    """Return the encoders' instance type, and the number of GPUs where the options have one."""
    if options.encoders is None:
        return _instance(accelerator or "A10G", prices, options.terms, "--encoders"), None
    instance, count = _group("--encoders", options.encoders)
    return instance, count * instance.gpus if count else None


def _instance(
    accelerator: str, prices: Prices, terms: str, option: str, workers: int | None = None, gpus_each: int = 1
) -> Instance:
    """Return the cheapest instance with an accelerator; if its name stands for several GPUs, prefer the largest."""
    gpus = gpus_by_accelerator(accelerator)
    most = max((gpu.memory_bytes for gpu in gpus), default=0)
    for names in ([gpu.name for gpu in gpus if gpu.memory_bytes == most], [gpu.name for gpu in gpus]):
        for on_terms in (terms, "on-demand"):
            if (instance := prices.best(names, on_terms, workers, gpus_each)) is not None:
                return instance
    hardware = accelerator if gpus_each == 1 else f"{gpus_each} {accelerator} or more"
    raise UserError(f"plan: expected an instance with a price for {hardware}, got none; name one with {option}")


def _group(option: str, text: str) -> tuple[Instance, int | None]:
    match = _GROUP.fullmatch(text)
    if match is None or match[2] not in INSTANCES or not INSTANCES[match[2]].gpus or match[1] == "0":
        known = ", ".join(name for name, instance in INSTANCES.items() if instance.gpus)
        raise UserError(f"plan: {option}: expected TYPE or COUNTxTYPE, got {text!r}; types are {known}")
    return INSTANCES[match[2]], int(match[1]) if match[1] else None


# --- from work to a plan ---------------------------------------------------------------------------------------------


def plans(work: PlannedJob, speeds: Speeds, prices: Prices) -> list[Plan]:
    """Return the plan of the configured mode, then of the others on the same trainers.

    Encoders that the command line counts count in all modes; those of the configuration only in its own.
    """
    counted = work.options.encoders is not None
    others = [mode for mode in MODES if mode != work.mode] if work.trainer_gpus else []
    alternatives = [replace(work, mode=mode, encoder_gpus=work.encoder_gpus if counted else None) for mode in others]
    return [_plan(each, speeds, prices) for each in (work, *alternatives)]


def _plan(work: PlannedJob, speeds: Speeds, prices: Prices) -> Plan:
    """Return the stages of one way to do the work, with their time and cost."""
    stages, have = [], work.options.have
    if have == "nothing":
        stages.append(_download(work, prices))
    if work.mode == "offline" and work.phases and have != "latents":
        stages.append(_process(work, speeds, prices))
    stages += [_train(phase, work, speeds, prices) for phase in work.phases if phase.samples]
    if not work.trainer_gpus:
        return Plan(f"{stages[0].name}, {stages[0].groups[0].count} x {stages[0].groups[0].instance}", tuple(stages))
    stages.append(_storage(work, sum(stage.hours for stage in stages), prices))
    return Plan(f"{work.mode}, {work.trainer_count} x {work.trainers.name}", tuple(stages))


def _download(work: PlannedJob, prices: Prices) -> Stage:
    published, instance = reference()["downloading"], INSTANCES["m5.8xlarge"]
    rate = published["img_per_s_per_vcpu"] * instance.vcpus * _HOSTS
    group = _price_group(instance, _HOSTS, 0, work, prices)
    return stage("download", work.rows, rate, [group], source=f"published, {published['source']}")


def _process(work: PlannedJob, speeds: Speeds, prices: Prices) -> Stage:
    """Return the stage that encodes every image once, at all resolutions."""
    figures = [speeds.encode(str(work.encoders.gpu), side) for side in sorted({p.resolution for p in work.phases})]
    count = work.encoder_gpus or _PROCESS_GPUS
    rate = count / sum(1 / figure.value for figure in figures)
    source = "; ".join(dict.fromkeys(figure.source for figure in figures))
    return stage("process", work.rows, rate, [_encoder_group(work, count, prices)], source=source)


def _train(phase: Phase, work: PlannedJob, speeds: Speeds, prices: Prices) -> Stage:
    gpu = str(work.trainers.gpu)
    figure = (speeds.collocated if work.mode == "collocated" else speeds.train)(gpu, phase.resolution)
    rate, limit, source = figure.value * work.trainer_gpus, "trainers", figure.source
    groups = [_price_group(work.trainers, work.trainer_count, work.trainer_gpus * work.gpus_each, work, prices)]
    if work.mode == "online":
        encode = speeds.encode(str(work.encoders.gpu), phase.resolution)
        count = work.encoder_gpus or encoders_needed(rate, encode.value)
        groups.append(_encoder_group(work, count, prices))
        if encode.value * count < rate:
            rate, limit, source = encode.value * count, "encoders", encode.source
    return stage(phase.name, phase.samples, rate, groups, limit=limit, source=source)


def _storage(work: PlannedJob, hours: float, prices: Prices) -> Stage:
    """Return the cost of storing latents and checkpoints while the job runs."""
    sides = {phase.resolution for phase in work.phases}
    row_bytes = sum(_LATENT_BYTES * side**2 for side in sides) + _TOKEN_BYTES
    gigabytes = work.checkpoints * _CHECKPOINT_GB + (work.rows * row_bytes / 1e9 if work.mode == "offline" else 0.0)
    cost = gigabytes * prices.storage.per_gb_month * hours / _MONTH_H
    return Stage("storage", 0, 0.0, 0.0, 0.0, cost, source=f"{gigabytes:,.0f} GB while the job runs")


def captions(work: PlannedJob, own: Plan, prices: Prices) -> str:
    """Return the cost of an offline dataset's captions, as token ids and as embeddings."""
    text, hours, cost = float(reference()["flops"]["text"]), 0.0, 0.0
    for phase in work.phases:
        share = text / unet_flops(phase.resolution)
        hours += sum(share * stage.gpu_hours for stage in own.stages if stage.name == phase.name)
        cost += sum(share * stage.cost for stage in own.stages if stage.name == phase.name)
    gigabytes = work.rows * _EMBEDDING_BYTES / 1e9
    return (
        f"token ids take {_TOKEN_BYTES} bytes a row, and the trainers run the text encoder, which adds {hours:,.0f} "
        f"{work.trainers.gpu} hours, {cost:,.0f} {prices.currency} that the table leaves out; embeddings "
        f"(text_embedding) take {gigabytes:,.0f} GB in all, {gigabytes * prices.storage.per_gb_month:,.0f} "
        f"{prices.currency} a month, and trainers load no text encoder"
    )


def _encoder_group(work: PlannedJob, gpus: int, prices: Prices) -> InstanceGroup:
    return _price_group(work.encoders, math.ceil(gpus / work.encoders.gpus), gpus, work, prices)


def _price_group(instance: Instance, count: int, gpus: int, work: PlannedJob, prices: Prices) -> InstanceGroup:
    """Return a group with its price. Only trainers must have one on these terms; others may be on demand instead."""
    own = prices.row(instance.name, work.options.terms) if instance is not work.trainers else None
    terms = work.options.terms if instance is work.trainers or own else "on-demand"
    return InstanceGroup(instance.name, count, gpus, count * prices.need(instance.name, terms).per_hour)
