"""The plan of a configured job: its stages with their hours and cost, for each way to feed the trainers."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sdp.config import JobConfig
from sdp.config.caption import CaptionConfig
from sdp.config.process import ProcessConfig
from sdp.config.train import TrainConfig
from sdp.datasets.manifest import MANIFEST, open_dataset
from sdp.errors import UserError
from sdp.families import LatentSpace, TextSpace, of, space_of
from sdp.families.sd import SD2
from sdp.hardware import INSTANCES, Instance, gpus_by_accelerator
from sdp.plan.prices import Prices, instances, reference
from sdp.plan.speeds import Speeds, text_flops, unet_flops
from sdp.sources.tars import PICTURES
from sdp.storage import open_storage

MODES = ("offline", "online", "collocated")
_HOSTS = 10
"""Instances that download, as many as in the published figure."""
_PROCESS_GPUS = 40
"""The most encoders of an offline pass by default, as published; fewer where an hour of each is more than enough. The
pass costs the same with any number."""
_HOURS_A_MONTH = 730
_GROUP = re.compile(r"(?:(\d{1,4})x)?([a-z0-9-]+\.[a-z0-9]+)", re.ASCII)


# --- time and money --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of one type that work together."""

    instance: str
    count: int
    gpus: int
    """GPUs of all of them."""
    per_hour: float
    """Price of all of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a plan."""

    name: str
    samples: int
    rate: float
    """Images a second."""
    groups: tuple[InstanceGroup, ...]
    limit: str = ""
    """The part that sets the rate: trainers or encoders."""
    source: str = ""
    """Source of the rate."""

    @property
    def hours(self) -> float:
        return self.samples / self.rate / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * sum(group.gpus for group in self.groups)

    @property
    def cost(self) -> float:
        return self.hours * sum(group.per_hour for group in self.groups)


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages of one way to do a job."""

    name: str
    stages: tuple[Stage, ...]
    stored: float = 0.0
    """Bytes of latents, which are kept to the end."""
    gb_hour: float = 0.0
    """Price of keeping a gigabyte for an hour."""

    @property
    def hours(self) -> float:
        return sum(stage.hours for stage in self.stages)

    @property
    def storage_cost(self) -> float:
        return self.stored / 1e9 * self.gb_hour * self.hours

    @property
    def gpu_hours(self) -> float:
        return sum(stage.gpu_hours for stage in self.stages)

    @property
    def cost(self) -> float:
        return sum(stage.cost for stage in self.stages) + self.storage_cost


# --- from a configuration --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    resolution: int
    samples: int


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """A training: its images, its phases and the instances that do it."""

    phases: tuple[Phase, ...]
    rows: int
    """Images to process."""
    rows_assumed: bool
    """True if the number of images is unknown, so that one is assumed for each training sample."""
    mode: str
    latents: LatentSpace
    text: TextSpace
    """The form in which captions are stored."""
    trains_text: bool
    """True if the text encoder is trained as well."""
    speeds: Speeds
    trainers: Instance
    trainer_gpus: int
    """Trainers, each with one GPU."""
    encoders: Instance
    encoder_gpus: int | None
    """None stands for as many as the trainers need, or the published number in an offline pass."""


def training(
    config: TrainConfig,
    prices: Prices,
    *,
    trainers: str | None = None,
    encoders: str | None = None,
    rows: int | None = None,
    model: Path | None = None,
) -> PlannedTraining:
    """Return the work that a training's configuration describes, or the command line where it names something.

    Stored rows have the size that the model in the folder `model` needs, by default Stable Diffusion 2.
    """
    gpus, embedded = config.scaling.most, config.encode.text == "text_embedding"
    train_on, count = _instance("--trainers", trainers, config.scaling.gpu_type or "A100", prices, gpus)
    encode_on, encoder_count = _instance("--encoders", encoders, config.encode.gpu_type or "A10G", prices)
    gpus = count * train_on.gpus if count else gpus
    rows = rows or config.limit or count_images(config.source.uri)
    names = ("train",) if len(config.phases) == 1 else ("phase 1", "phase 2")
    named = zip(names, config.phases, strict=True)
    phases = tuple(Phase(name, phase.data.resolution, _samples(phase, gpus, rows)) for name, phase in named)
    if model:
        text = of(model).text(model, embedded=embedded)
    else:
        text = TextSpace(width=SD2.text_encoder["hidden_size"] if embedded else None)
    configured = config.encode.most if config.data.mode == "online" else None
    return PlannedTraining(
        phases,
        rows=rows or phases[0].samples,
        rows_assumed=not rows,
        mode=config.data.mode,
        latents=space_of(model) if model else LatentSpace(),
        text=text,
        trains_text=config.model.train_text_encoder,
        speeds=Speeds(f"{config.strategy.kind}+compile" if config.strategy.compile else config.strategy.kind),
        trainers=train_on,
        trainer_gpus=gpus,
        encoders=encode_on,
        encoder_gpus=encoder_count * encode_on.gpus if encoder_count else configured,
    )


def count_images(uri: str) -> int | None:
    """Return the number of images in a dataset or folder of pictures on this machine; None for anything else."""
    if not Path(uri).is_dir():
        return None
    storage = open_storage(uri)
    if storage.exists(MANIFEST):
        return open_dataset(storage).manifest.counts.written
    return sum(file.suffix.lower() in PICTURES for file in Path(uri).rglob("*")) or None


def _samples(config: TrainConfig, gpus: int, rows: int | None) -> int:
    epochs = config.max_epochs * rows if config.max_epochs and rows else None
    limits = [config.max_steps and config.max_steps * config.data.batch_of(gpus), epochs]
    if not any(limits):
        raise UserError("plan: expected an end that can be counted, got max_epochs of unknown data; give --rows")
    return min(limit for limit in limits if limit)


def _instance(
    option: str, text: str | None, accelerator: str, prices: Prices, workers: int | None = None
) -> tuple[Instance, int | None]:
    """Return the instance type that an option names, and its count if it has one.

    Without the option it is the cheapest with the accelerator, whose name may stand for several GPUs: the largest then.
    """
    if text is not None:
        match = _GROUP.fullmatch(text)
        if match is None or match[2] not in INSTANCES or not INSTANCES[match[2]].gpus or match[1] == "0":
            known = ", ".join(name for name, instance in INSTANCES.items() if instance.gpus)
            raise UserError(f"plan: {option}: expected TYPE or COUNTxTYPE, got {text!r}; types are {known}")
        count = int(match[1]) if match[1] else None
        return INSTANCES[match[2]], count
    gpus = gpus_by_accelerator(accelerator)
    most = max((gpu.memory_bytes for gpu in gpus), default=0)
    for names in ([gpu.name for gpu in gpus if gpu.memory_bytes == most], [gpu.name for gpu in gpus]):
        if (cheapest := prices.best(names, workers)) is not None:
            return cheapest, None
    raise UserError(f"plan: expected an instance with a price for {accelerator}, got none; name one with {option}")


# --- from work to plans ----------------------------------------------------------------------------------------------


def plans(work: PlannedTraining, prices: Prices) -> list[Plan]:
    """Return the plan of the configured mode, then of the others on the same trainers and as many encoders."""
    modes = dict.fromkeys((work.mode, *MODES))
    return [_plan(replace(work, mode=mode), prices) for mode in modes]


def plan_of_data(
    config: JobConfig,
    prices: Prices,
    *,
    encoders: str | None = None,
    rows: int | None = None,
    rate: float | None = None,
) -> Plan:
    """Return the plan of a download, process or caption job; the last needs `rate`, the captions a second of a GPU."""
    rows = rows or config.limit or count_images(str(getattr(config.source, "uri", "")))
    if rows is None:
        raise UserError("plan: expected the number of images, got none; give --rows or set limit")
    if not isinstance(config, ProcessConfig | CaptionConfig):
        published, instance = reference()["downloading"], INSTANCES["m5.8xlarge"]
        images_per_s = published["img_per_s_per_vcpu"] * instance.vcpus * _HOSTS
        group = InstanceGroup(instance.name, _HOSTS, 0, _HOSTS * prices.need(instance.name).per_hour)
        source = f"published, {published['source']}"
        return _plan_of_stage(Stage("download", rows, images_per_s, (group,), source=source))
    encode_on, count = _instance("--encoders", encoders, config.encode.gpu_type or "A10G", prices)
    gpus = count * encode_on.gpus if count else config.encode.most
    if isinstance(config, ProcessConfig):
        return _plan_of_stage(_process(rows, config.resolutions, encode_on, gpus, prices))
    if rate is None:
        raise UserError("plan: expected --rate, the captions a second of one GPU; sdp caption --set limit=200 shows it")
    group, captions = _group(encode_on, gpus, prices), rows * len(config.captions.prompts)
    return _plan_of_stage(Stage("caption", captions, rate * gpus, (group,), source="--rate"))


def _plan_of_stage(stage: Stage) -> Plan:
    return Plan(f"{stage.name}, {stage.groups[0].count} x {stage.groups[0].instance}", (stage,))


def _plan(work: PlannedTraining, prices: Prices) -> Plan:
    """Return the stages of one way to do the work."""
    stages = [_train(phase, work, prices) for phase in work.phases]
    name = f"{work.mode}, {stages[0].groups[0].count} x {work.trainers.name}"
    if work.trains_text or (work.mode == "offline" and work.text.width is None):
        texts = [_text(phase, stage, work) for phase, stage in zip(work.phases, stages, strict=True)]
        stages = [part for both in zip(stages, texts, strict=True) for part in both]
    if work.mode != "offline":
        return Plan(name, tuple(stages))
    sides = {phase.resolution for phase in work.phases}
    process = _process(work.rows, sides, work.encoders, work.encoder_gpus, prices)
    row = work.text.bytes + sum(2 * math.prod(work.latents.shape(side)) for side in sides)
    return Plan(name, (process, *stages), work.rows * row, prices.storage_gb_month / _HOURS_A_MONTH)


def _process(rows: int, sides: Iterable[int], encoders: Instance, gpus: int | None, prices: Prices) -> Stage:
    """Return the stage that encodes every image once, at all resolutions."""
    figures = [Speeds().encode(str(encoders.gpu), side) for side in sorted(set(sides))]
    rate = 1 / sum(1 / figure.value for figure in figures)
    gpus = gpus or min(_PROCESS_GPUS, math.ceil(rows / rate / 3600))
    source = "; ".join(dict.fromkeys(figure.source for figure in figures))
    return Stage("process", rows, rate * gpus, (_group(encoders, gpus, prices),), source=source)


def _train(phase: Phase, work: PlannedTraining, prices: Prices) -> Stage:
    gpu, speeds = str(work.trainers.gpu), work.speeds
    speed_of = speeds.collocated if work.mode == "collocated" else speeds.train
    figure = speed_of(gpu, phase.resolution)
    rate, limit, source = figure.value * work.trainer_gpus, "trainers", figure.source
    groups = [_group(work.trainers, work.trainer_gpus, prices)]
    if work.mode == "online":
        encode = speeds.encode(str(work.encoders.gpu), phase.resolution)
        count = work.encoder_gpus or encoders_needed(rate, encode.value)
        groups.append(_group(work.encoders, count, prices))
        if encode.value * count < rate:
            rate, limit, source = encode.value * count, "encoders", encode.source
    return Stage(phase.name, phase.samples, rate, tuple(groups), limit, source)


def _text(phase: Phase, stage: Stage, work: PlannedTraining) -> Stage:
    """Return the time for which trainers run the text encoder: forward, and backward if it is trained.

    A collocated stage's own speed includes the forward pass.
    """
    passes = 3 if work.trains_text else 1  # a backward pass counts as two forward passes
    if work.mode == "collocated":
        passes -= 1
    unet = work.speeds.train(str(work.trainers.gpu), phase.resolution).value * work.trainer_gpus
    rate = unet * unet_flops(phase.resolution) / text_flops() / passes
    why = "encode.text: text_embedding of process spares it, not its bytes"
    if work.trains_text:
        why = "also backward, since model.train_text_encoder is set"
    source = f"estimate by operations from the U-Net's; {why}"
    return Stage("captions", stage.samples, rate, stage.groups, source=source)


def encoders_needed(train: float, encode: float) -> int:
    """Return the number of encoders that keep trainers of this total speed from waiting."""
    return math.ceil(round(train / encode, 9))


def _group(instance: Instance, gpus: int, prices: Prices) -> InstanceGroup:
    """Return the instances for workers with a GPU each."""
    count = instances(gpus, instance)
    return InstanceGroup(instance.name, count, gpus, count * prices.need(instance.name).per_hour)
