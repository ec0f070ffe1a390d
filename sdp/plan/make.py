"""The plan of a configured job, and its alternatives: other modes and other GPUs."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from sdp.config import JobConfig, ProcessConfig, TrainConfig
from sdp.errors import UserError
from sdp.hardware import GIB, GPUS, INSTANCES, Instance, gpus_by_accelerator
from sdp.model.family import SD2, caption_bytes, latent_shape
from sdp.plan import model
from sdp.plan.model import InstanceGroup, Interruptions, Plan, Stage, encoders_needed, stage
from sdp.plan.prices import Prices, instances, reference
from sdp.plan.speeds import Figure, Speeds, picture_flops, unet_flops

MODES = ("offline", "online", "collocated")
_TRAINER_MEMORY = 40 * GIB
"""The least memory of a GPU proposed for training: our choice, that of the smallest GPU with a published speed."""
MOST_INSTANCES = 64
"""The largest number of trainers' instances that is tried for a deadline."""
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
class Drawing:
    """Pictures that a job draws."""

    pictures: int
    passes: int
    """Forward passes of the U-Net for each picture."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's choices; None takes the configuration's."""

    trainers: str | None = None
    encoders: str | None = None
    rows: int | None = None
    terms: str = "on-demand"
    have: str = "images"
    """The data that storage already holds: nothing, images or latents."""
    egress_gb: float = 0.0
    """Gigabytes that leave the store's region."""
    drawing: Drawing | None = None
    """Pictures that the trainers' GPUs also draw (dreambooth)."""


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
    checkpoint_samples: int = 0
    """Samples from one checkpoint to the next."""
    checkpoints: int = 0
    """Checkpoints that are kept."""
    gpus_each: int = 1
    """GPUs of one trainer."""
    rows_assumed: bool = False
    """True if the number of images is unknown, so that one is assumed for each training sample."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the ways to feed the trainers, if there are any: dreambooth has only one."""
        return () if not self.trainer_gpus else MODES if self.options.drawing is None else (self.mode,)

    def on(self, trainers: Instance, count: int, mode: str, gpus: int | None = None) -> "PlannedJob":
        """Return the same work on other trainers (by default on all their GPUs), with the encoders that they need."""
        gpus = gpus or count * (trainers.gpus // self.gpus_each)
        work = replace(self, trainers=trainers, trainer_count=count, trainer_gpus=gpus, mode=mode, encoder_gpus=None)
        return work if self.options.drawing is None else replace(work, encoders=trainers, encoder_gpus=gpus)


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
    if options.drawing is not None and options.encoders is None:
        encoders, count = trainers, gpus
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
        checkpoint_samples=config.checkpoint.every_steps * config.data.batch_of(gpus),
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


def speeds_of(
    config: JobConfig, work: PlannedJob, measured: Mapping[int, Figure] | None = None, gpu: str | None = None
) -> Speeds:
    """Return the speeds to plan with: published ones, and `measured` ones by resolution on `gpu`.

    Without `gpu`, they were measured on the trainers' kind of GPU.
    """
    strategy = config.strategy.kind + "+compile" * config.strategy.compile if isinstance(config, TrainConfig) else "ddp"
    return Speeds(strategy, measured or {}, gpu or str(work.trainers.gpu))


# --- from work to a plan ---------------------------------------------------------------------------------------------


def plan(work: PlannedJob, speeds: Speeds, prices: Prices) -> Plan:
    """Return the stages of one way to do the work, with their time and cost."""
    stages, options = [], work.options
    if options.have == "nothing":
        stages.append(_download(work, prices))
    if options.drawing is not None:
        stages.append(_draw(options.drawing, work, speeds, prices))
    if work.mode == "offline" and work.phases and options.have != "latents":
        stages.append(_process(work, speeds, prices))
    stages += [_train(phase, work, speeds, prices) for phase in work.phases if phase.samples]
    name = f"{work.mode}, {work.trainer_count} x {work.trainers.name}"
    if work.trainer_gpus:
        stages.append(_storage(work, sum(stage.hours for stage in stages), prices))
    else:
        name = f"{stages[0].name}, {stages[0].groups[0].count} x {stages[0].groups[0].instance}"
    if options.egress_gb:
        stages.append(_egress(options.egress_gb, prices))
    return Plan(name, tuple(stages))


def _download(work: PlannedJob, prices: Prices) -> Stage:
    published, instance = reference()["downloading"], INSTANCES["m5.8xlarge"]
    rate = published["img_per_s_per_vcpu"] * instance.vcpus * _HOSTS
    group = _price_group(instance, _HOSTS, 0, work, prices)
    return stage("download", work.rows, rate, [group], source=f"published, {published['source']}")


def _draw(drawing: Drawing, work: PlannedJob, speeds: Speeds, prices: Prices) -> Stage:
    """Return the stage that draws pictures, at the operations per second that training reaches."""
    side = work.phases[0].resolution
    figure = speeds.train(str(work.trainers.gpu), side)
    rate = figure.value * work.trainer_gpus * unet_flops(side) / picture_flops(side, drawing.passes)
    source = f"estimate by operations, {drawing.passes} passes of the U-Net a picture, from training, {figure.source}"
    return stage("draw", drawing.pictures, rate, [_trainer_group(work, prices)], source=source)


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
    groups = [_trainer_group(work, prices)]
    if work.mode == "online":
        encode = speeds.encode(str(work.encoders.gpu), phase.resolution)
        count = work.encoder_gpus or encoders_needed(rate, encode.value)
        groups.append(_encoder_group(work, count, prices))
        if encode.value * count < rate:
            rate, limit, source = encode.value * count, "encoders", encode.source
    interruptions = interruptions_of(work, prices)
    longer = model.stretch(interval_h(work, rate), interruptions) if interruptions else 1.0
    return stage(phase.name, phase.samples, rate, groups, stretch=longer, limit=limit, source=source)


def _storage(work: PlannedJob, hours: float, prices: Prices) -> Stage:
    """Return the cost of storing latents and checkpoints while the job runs."""
    sides = {phase.resolution for phase in work.phases}
    row_bytes = sum(_LATENT_BYTES * side**2 for side in sides) + _TOKEN_BYTES
    gigabytes = work.checkpoints * _CHECKPOINT_GB + (work.rows * row_bytes / 1e9 if work.mode == "offline" else 0.0)
    cost = gigabytes * prices.storage.per_gb_month * hours / _MONTH_H
    return Stage("storage", 0, 0.0, 0.0, 0.0, cost, source=f"{gigabytes:,.0f} GB while the job runs")


def _egress(gigabytes: float, prices: Prices) -> Stage:
    if prices.storage.egress_per_gb is None:
        raise UserError("plan: --egress: expected a price in storage.egress_per_gb, got none; add it with --prices")
    return Stage("egress", 0, 0.0, 0.0, 0.0, gigabytes * prices.storage.egress_per_gb, source=f"{gigabytes:,.0f} GB")


def captions(work: PlannedJob, own: Plan, prices: Prices) -> str:
    """Return the cost of an offline dataset's captions, as token ids and as embeddings."""
    text, hours, cost, compared = float(reference()["flops"]["text"]), 0.0, 0.0, []
    for phase in work.phases:
        unet = unet_flops(phase.resolution)
        trained = next((stage for stage in own.stages if stage.name == phase.name), None)
        if trained is None:
            continue
        hours += trained.gpu_hours * text / unet
        cost += trained.cost * text / unet
        compared.append(f"{text / 1e9:.0f} of {(text + unet) / 1e9:,.0f} GFLOP at {phase.resolution} px")
    gigabytes = work.rows * _EMBEDDING_BYTES / 1e9
    monthly = gigabytes * prices.storage.per_gb_month
    return (
        f"token ids take {_TOKEN_BYTES} bytes a row, and the trainers run the text encoder: {', '.join(compared)}, "
        f"which adds {hours:,.0f} {work.trainers.gpu} hours, {cost:,.0f} {prices.currency} that the table leaves out; "
        f"embeddings (text_embedding) take {_EMBEDDING_BYTES:,} bytes a row, {gigabytes:,.0f} GB in all, "
        f"{monthly:,.0f} {prices.currency} a month, and trainers load no text encoder"
    )


def _trainer_group(work: PlannedJob, prices: Prices) -> InstanceGroup:
    return _price_group(work.trainers, work.trainer_count, work.trainer_gpus * work.gpus_each, work, prices)


def _encoder_group(work: PlannedJob, gpus: int, prices: Prices) -> InstanceGroup:
    return _price_group(work.encoders, math.ceil(gpus / work.encoders.gpus), gpus, work, prices)


def _price_group(instance: Instance, count: int, gpus: int, work: PlannedJob, prices: Prices) -> InstanceGroup:
    """Return a group with its price. Only trainers must have one on these terms; others may be on demand instead."""
    own = prices.row(instance.name, work.options.terms) if instance is not work.trainers else None
    terms = work.options.terms if instance is work.trainers or own else "on-demand"
    return InstanceGroup(instance.name, count, gpus, count * prices.need(instance.name, terms).per_hour)


def interruptions_of(work: PlannedJob, prices: Prices) -> Interruptions | None:
    """Return the trainers' interruptions on spot instances; None on other terms."""
    rate = prices.need(work.trainers.name, work.options.terms).interruptions_per_hour if work.trainer_gpus else None
    if not rate:
        return None
    cost = prices.interruption
    return Interruptions(1 / (rate * work.trainer_count), cost.checkpoint_s / 3600, cost.restart_s / 3600)


def interval_h(work: PlannedJob, rate: float) -> float:
    """Return the hours from one checkpoint to the next."""
    return work.checkpoint_samples / rate / 3600


def online(phase: Phase, work: PlannedJob, encoders: int, speeds: Speeds, prices: Prices) -> Stage:
    """Return a phase in online mode with this many encoders."""
    return _train(phase, replace(work, mode="online", encoder_gpus=encoders), speeds, prices)


# --- alternatives ----------------------------------------------------------------------------------------------------


def modes(work: PlannedJob, speeds: Speeds, prices: Prices) -> list[Plan]:
    """Return the plan of each mode on the same trainers. Only the configured mode has the configured encoders."""
    own = {work.mode: work}
    return [plan(own.get(mode, replace(work, mode=mode, encoder_gpus=None)), speeds, prices) for mode in work.modes]


def others(work: PlannedJob, speeds: Speeds, prices: Prices) -> list[Plan]:
    """Return the plans with the same number of trainers on other kinds of GPU, the cheapest first."""
    plans = [
        plan(work.on(instance, count, mode, work.trainer_gpus), speeds, prices)
        for instance in _candidates(work, prices, work.trainer_gpus)
        if instance is not work.trainers
        for count in [instances(work.trainer_gpus, work.gpus_each, instance)]
        for mode in work.modes
    ]
    return sorted(plans, key=lambda candidate: candidate.cost)


def in_time(work: PlannedJob, speeds: Speeds, prices: Prices, deadline_h: float) -> Plan | None:
    """Return the cheapest plan that meets a deadline, with as many instances as that takes."""
    if not work.trainer_gpus:
        counts = [work.encoder_gpus, *(count * work.encoders.gpus for count in range(1, MOST_INSTANCES + 1))]
        sized = (plan(replace(work, encoder_gpus=count), speeds, prices) for count in counts)
        return next((candidate for candidate in sized if candidate.hours <= deadline_h), None)
    plans = []
    for instance in [work.trainers, *_candidates(work, prices)]:
        for mode in work.modes:
            sizes = (work.on(instance, count, mode) for count in range(1, MOST_INSTANCES + 1))
            sized = (plan(size, speeds, prices) for size in sizes)
            plans += list(islice((candidate for candidate in sized if candidate.hours <= deadline_h), 1))
    return min(plans, key=lambda candidate: candidate.cost, default=None)


def _candidates(work: PlannedJob, prices: Prices, workers: int | None = None) -> Iterator[Instance]:
    """Yield the cheapest instance of each GPU that can train, for this many `workers` or else per GPU."""
    for gpu in GPUS.values():
        if (
            gpu.memory_bytes >= _TRAINER_MEMORY
            and (instance := prices.best([gpu.name], work.options.terms, workers, work.gpus_each)) is not None
        ):
            yield instance
