"""The configuration of `sdp train`. The defaults are the recipe of Stable Diffusion v2-base at 256 pixels."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from sdp.config.base import REQUIRED, Section, key
from sdp.config.phrases import Says
from sdp.config.process import CaptionedSource, CompiledEncoderConfig, ModelConfig, TransformConfig, usual_batch
from sdp.config.shared import Filters, JobConfig, OutputConfig, Workers, WorkersConfig
from sdp.config.types import Name, Positive, Resolution, Uri
from sdp.errors import Problem

PHASES = ("phase-1", "phase-2")
"""The folders of a two-phase run, each of which is a run."""


RECIPE_BATCH = 2048
"""Samples per step of Stable Diffusion v2, which make 550,000 steps its 1,126,400,000 samples at 256 px."""


def _usual_batch(side: int) -> int:
    """Return what an A100 of 80 GB takes at once: 128 samples at 256 px, a quarter at twice the side."""
    return 2 * usual_batch(side)


class ColumnsConfig(Section):
    """The column names of a latents dataset that sdp process did not write.

    With these set, plain Parquet files are a dataset too: lists or Ray tensors of numbers, such as fp32 latents.
    """

    latents: Name | None = key(None, shapes_output=True, example="image_latents_{resolution}")
    """The column of latents; {resolution} in it stands for data.resolution. null means latents_{resolution} or
    moments_{resolution}."""
    text: Annotated[tuple[Name, ...], Says("a list of one name or none")] = key((), shapes_output=True, max_length=1)
    """A list of the column of text, as token ids or embeddings; [] means token_ids or text_embedding."""
    factor: float | None = key(None, shapes_output=True, gt=0)
    """Factor for stored numbers: 1 if the latents are already scaled, 0.18215 if they are the raw output of Stable
    Diffusion 2's VAE. null means 1, and refuses latents that look unscaled."""


class MixedSource(Section):
    """A further latents dataset."""

    uri: Uri = key(REQUIRED, shapes_output=True)
    """The dataset."""
    weight: float = key(REQUIRED, shapes_output=True, gt=0)
    """Number of its samples for each sample of source.uri."""
    columns: ColumnsConfig = key(ColumnsConfig)
    """The names of its columns."""


class TrainSource(CaptionedSource):
    uri: Uri = key(REQUIRED, shapes_output=True, example="s3://bucket/latents")
    """The dataset to train on: latents if data.mode is offline, images if it is online or collocated."""
    columns: ColumnsConfig = key(ColumnsConfig)
    """The column names of a latents dataset."""
    also: tuple[MixedSource, ...] = key((), shapes_output=True)
    """Further latents datasets to mix in, each {uri, weight, columns}: weight is the number of its samples for each
    sample of source.uri. An epoch is one pass over source.uri."""

    def contradictions(self) -> Iterable[Problem]:
        uris = [self.uri, *(other.uri for other in self.also)]
        for number, other in enumerate(self.also):
            if uris.index(other.uri) <= number:
                yield Problem(f"also.{number}.uri", "each dataset once", repr(other.uri), "raise its weight instead")


class DataConfig(Section):
    """The path of samples to the trainers."""

    mode: Literal["offline", "online", "collocated"] = key("offline", shapes_output=True)
    """Read stored latents (offline), encode on other nodes during training (online), or encode on the training GPUs
    (collocated)."""
    resolution: Resolution = key(256, shapes_output=True)
    """Side of the square pictures to train on."""
    batch_size: Positive = key(128)
    """Samples that one trainer processes at once; limited by GPU memory. If scaling.accelerator is a GPU, the default
    is 128 up to 256 px and a quarter at twice the side."""
    global_batch_size: Positive | None = key(None, shapes_output=True)
    """Samples per step over all trainers, accumulated over rounds of batch_size; null means one round. If
    scaling.accelerator is a GPU and model.denoiser is new, the default is 2048, as Stable Diffusion's."""
    trust_encoder: bool = key(False)
    """Accept a dataset whose latents were made by another model than model.source."""
    holdout: float = key(0.0, shapes_output=True, ge=0, lt=1)
    """Share of rows, chosen by a hash of their address, that are never trained on."""
    readers: Positive = key(4)
    """Readers for each trainer: threads if mode is offline, processes if it is collocated."""

    def batch_of(self, trainers: int) -> int:
        """Return the samples per step of that many trainers."""
        return self.global_batch_size or self.batch_size * trainers


class TrainTransformConfig(TransformConfig):
    """Decoding, resizing and cropping on CPU, if data.mode is online or collocated."""

    crop: Literal["center", "random"] = key("center", shapes_output=True)
    """The part of an image to use: its middle square, or a random square, drawn anew in each epoch."""


class TrainEncodeConfig(CompiledEncoderConfig):
    """The encoders, if data.mode is online (each in its own actor) or collocated (one in each trainer).

    They return the mean and variance of the VAE's distribution; the trainer draws a sample from it in each epoch.
    """

    num_workers: Workers = key(1)
    """Number of encoders (online), or a range: as many as have places beside the trainers when training starts."""
    batch_size: Positive | None = key(None)
    """Images per encoder batch; null means 64 at 256 px and a quarter at twice the side. Halved automatically where
    memory is short."""
    text: Literal["token_ids", "text_embedding"] | None = key(None)
    """Where the text encoder runs: in the encoders (text_embedding, which sends 158 kB a row with SD2) or in the
    trainers (token_ids, 154 bytes). null means the encoders if data.mode is online and model.train_text_encoder is
    false, else the trainers."""


class ObjectiveConfig(Section):
    """The training objective."""

    prediction: Literal["epsilon", "v", "flow"] | None = key(None, shapes_output=True)
    """The model's target: the noise (epsilon, as 512-base), the velocity (v, as 768) or that of a flow (PRX); null
    means the target that model.start_from, or else model.source, was trained for."""
    times: Literal["logit_normal", "uniform"] = key("logit_normal", shapes_output=True)
    """A flow's times: those in the middle more often, or all alike."""
    shift: float = key(1.0, shapes_output=True, gt=0)
    """A factor that moves a flow's times towards the noise, for 256 px; it grows with the pictures' side."""
    caption_dropout: float = key(0.1, shapes_output=True, ge=0, le=1)
    """Probability that a sample's caption is replaced by the empty string, drawn anew in each epoch."""
    skipped_tokens: float = key(0.0, shapes_output=True, ge=0, lt=1)
    """Share of a picture's tokens that skip the middle blocks of PRX in training (TREAD), drawn anew in each epoch. 0.5
    trains faster, better at 512 px and above, and worse at 256 px."""
    min_snr_gamma: float | None = key(None, shapes_output=True, gt=0)
    """Min-SNR weighting: cap on the signal-to-noise ratio in a timestep's loss weight, often 5; null disables it."""
    offset_noise: float = key(0.0, shapes_output=True, ge=0)
    """Strength of noise that is constant over each channel, often 0.1."""
    zero_terminal_snr: bool = key(False, shapes_output=True)
    """Rescale the noise schedule so that no signal is left at its last timestep."""

    def contradictions(self) -> Iterable[Problem]:
        if self.zero_terminal_snr and self.prediction == "epsilon":
            hint = "at zero SNR the noise is the input itself, so epsilon teaches nothing"
            yield self.problem("prediction", "v while zero_terminal_snr is on", hint)


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    kind: Literal["adamw", "adamw8bit", "adafactor", "muon", "prodigy"] = key("adamw", shapes_output=True)
    """The optimizer. All but adamw need strategy.kind ddp; adamw8bit needs the package torchao, prodigy prodigyopt."""
    learning_rate: float = key(1e-4, gt=0)
    """The learning rate after the warm-up; it may change between jobs."""
    schedule: Literal["constant", "cosine", "linear"] = key("constant", shapes_output=True)
    """The learning-rate schedule after the warm-up; cosine and linear reach 0 at max_steps."""
    warmup_steps: int = key(10_000, ge=0)
    """Steps over which the learning rate rises from zero; it may change between jobs."""
    weight_decay: float = key(0.01, shapes_output=True, ge=0)
    """The optimizer's weight decay."""
    clip_norm: float | None = key(None, gt=0)
    """Maximum gradient norm; larger gradients are scaled down. null disables it."""


class EmaConfig(Section):
    """The moving average of the weights, from which pictures are generated."""

    decay: float | None = key(0.9999, shapes_output=True, ge=0, lt=1)
    """Decay of the average per step, reached gradually at the start; null keeps no average."""


class ScalingConfig(WorkersConfig):
    """The number of trainers, and where they run."""

    can_grow: bool = key(False)
    """The cluster adds nodes on demand: after a loss, wait up to a minute for another node before going on with fewer
    trainers, and let encoders and transforms always reserve CPUs."""


_lower = BeforeValidator(lambda name: str(name).lower())
Kind = Annotated[Literal["ddp", "fsdp"], _lower]
Shard = Annotated[Literal["shard_grad_op", "full_shard"], _lower]


class StrategyConfig(Section):
    """The parallelism, and what makes a step faster or smaller."""

    kind: Kind = key("ddp")
    """Keep the whole state on each GPU (ddp) or a shard of it (fsdp, the default for several trainers whose
    scaling.accelerator is a GPU)."""
    shard: Shard = key("shard_grad_op")
    """The state that fsdp shards: all but the gathered weights between forward and backward (shard_grad_op), or those
    as well (full_shard)."""
    compile: bool = key(False)
    """Compile the U-Net's blocks, for each shape of batches before the first step, which takes longer. The default is
    true if scaling.accelerator is a GPU."""
    activation_checkpointing: bool = key(False)
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""


class CheckpointConfig(Section):
    """Checkpoints: their frequency, and how many are kept."""

    every_steps: Positive = key(1000)
    """Steps between checkpoints."""
    keep_last: Positive = key(3)
    """Number of newest checkpoints to keep."""


class WandbConfig(Section):
    """Weights & Biases. Its library is not part of sdp: add it to the image. Its key comes from WANDB_API_KEY."""

    project: Name | None = key(None)
    """The project that receives the configuration, each line of the metrics and the samples; null disables it."""


class MlflowConfig(Section):
    """MLflow. Its library is not part of sdp: add it to the image. MLFLOW_TRACKING_URI names its server."""

    experiment: Name | None = key(None)
    """The experiment whose run receives what Weights & Biases would; null disables it."""


class LogConfig(Section):
    """The metrics that a run writes."""

    every_steps: Positive = key(10)
    """Steps between lines of the metrics."""
    tensorboard: bool = key(False)
    """Write OUTPUT/tensorboard as well, for TensorBoard."""
    wandb: WandbConfig = key(WandbConfig)
    """Weights & Biases."""
    mlflow: MlflowConfig = key(MlflowConfig)
    """MLflow."""

    @property
    def trackers(self) -> dict[str, str]:
        """The keys of the trackers that are set, each with its value; a key's second name is the library's."""
        places = {"log.wandb.project": self.wandb.project, "log.mlflow.experiment": self.mlflow.experiment}
        return {path: place for path, place in places.items() if place is not None}


class ProfileConfig(Section):
    """A profile of some steps by torch's profiler on the first trainer, in OUTPUT/profile."""

    steps: Positive | None = key(None)
    """Steps to profile; null profiles none. Training pauses for a few seconds while it is written."""


class TrainEvaluateConfig(Section):
    """The validation loss, by timestep, on rows that are not trained on: always the same rows with the same noise.

    Training pauses while all trainers measure their share.
    """

    every_steps: Positive | None = key(None)
    """Steps between measurements; null disables them."""
    source: Uri | None = key(None, example="s3://bucket/validation-latents")
    """A latents dataset, all of it; null means the rows of source.uri that data.holdout keeps from training."""
    rows: Positive = key(1024)
    """Number of rows to measure on."""


class SamplesConfig(Section):
    """Pictures drawn during training, from the moving average if there is one.

    Training waits while the first trainer draws: 25 steps of one picture take as long as training on 17 samples.
    """

    every_steps: Positive | None = key(None)
    """Steps between sets of pictures, in OUTPUT/samples; null draws none."""
    prompts: tuple[Name, ...] = key(())
    """The prompts: one picture for each, always from the same noise."""
    steps: Positive = key(25, le=1000)
    """Denoising steps per picture."""

    def contradictions(self) -> Iterable[Problem]:
        if self.every_steps is not None and not self.prompts:
            yield self.problem("prompts", "one or more prompts while every_steps is set", "list some", "none")


class TrainModelConfig(ModelConfig):
    source: Name = key(REQUIRED, shapes_output=True, example="builtin:tiny")
    """The model to train: builtin:tiny, a local or s3:// folder in diffusers layout, or a hub id with its revision."""
    denoiser: Literal["new", "pretrained"] = key("new", shapes_output=True)
    """Begin with new weights, drawn from the seed as Stable Diffusion's were, or with those of the source."""
    train_text_encoder: bool = key(False, shapes_output=True)
    """Train the text encoder as well, from the source's weights; the dataset must hold token ids."""
    start_from: Uri | None = key(None, shapes_output=True, example="s3://bucket/phase-1/checkpoints/step-000550000")
    """A run or checkpoint whose weights and moving average this run begins with."""


class LoraConfig(Section):
    """LoRA: small matrices trained beside some linear layers, which are frozen."""

    rank: Positive | None = key(None, shapes_output=True)
    """The rank of the matrices, often 4 to 64; null trains the networks themselves."""
    alpha: float | None = key(None, shapes_output=True, gt=0)
    """Their output is multiplied by alpha / rank; null means the rank."""
    targets: tuple[Name, ...] = key(("to_q", "to_k", "to_v", "to_out.0"), shapes_output=True)
    """Name endings of the U-Net's layers that get one; the default is all of attention. In a text encoder that is
    trained, all of attention gets one."""
    start_from: Uri | None = key(None, shapes_output=True, example="./subject.safetensors")
    """A LoRA's file of the same rank to begin with, of sdp, kohya's scripts or diffusers; its layers are the default
    targets."""

    @property
    def scale(self) -> float:
        """The factor of the matrices' product."""
        return 1.0 if self.alpha is None or self.rank is None else self.alpha / self.rank

    def contradictions(self) -> Iterable[Problem]:
        if not self.targets:
            yield self.problem("targets", "one or more name endings", "list some, such as to_q", "none")
        if self.start_from is not None and self.rank is None:
            yield self.problem("rank", "that of the file while start_from is set", "often 4 to 64", "null")


class SecondPhaseConfig(Section):
    """A second phase, often at a higher resolution.

    It is a separate run, in OUTPUT/phase-2, and begins with the weights and the moving average of the first, in
    OUTPUT/phase-1. All other keys are the same in both.
    """

    max_steps: Positive | None = key(None, shapes_output=True)
    """Steps of the second phase; null means there is no second phase."""
    resolution: Resolution | None = key(None, shapes_output=True)
    """Its data.resolution; null keeps it."""
    batch_size: Positive | None = key(None)
    """Its data.batch_size; null keeps it. With another resolution, the default on GPUs is that of data.batch_size."""
    global_batch_size: Positive | None = key(None, shapes_output=True)
    """Its data.global_batch_size; null keeps it."""
    source: Uri | None = key(None, shapes_output=True, example="s3://bucket/latents")
    """Its source.uri; null keeps it."""
    skipped_tokens: float | None = key(None, shapes_output=True, ge=0, lt=1)
    """Its objective.skipped_tokens; null keeps it."""

    def contradictions(self) -> Iterable[Problem]:
        if self.max_steps is None and any(value is not None for _, value in self):
            yield self.problem("max_steps", "a whole number", "set the second phase's length, or remove phase_2")


Amount = Annotated[float, Field(ge=0)]
Price = Annotated[Amount | Name, Says("a price, or an instance type with a known one, such as p4de.24xlarge")]


class PricesConfig(Section):
    """Prices by the hour, for the cost so far and max_cost."""

    trainer_hour: Price | None = key(None, example="p4de.24xlarge")
    """One trainer with its GPUs, in any currency; or its instance type, for the share of its GPUs in the on-demand
    price (USD) that sdp plan knows. The chart names the type in its group's node selector. null means no cost."""
    encoder_hour: Price | None = key(None, example="g5.2xlarge")
    """One encoder with its GPU (online), in the same way."""

    @property
    def hourly(self) -> dict[str, float]:
        """The prices that are numbers."""
        return {name: price for name, price in self if not isinstance(price, str | None)}


class TrainConfig(JobConfig):
    """Train a model from latents or images, and continue from its last checkpoint when run again."""

    source: TrainSource = key(REQUIRED)
    """The dataset to train on."""
    output: OutputConfig = key(REQUIRED)
    """The run: its checkpoints, events and metrics."""
    limit: Positive | None = key(None)
    """Use only this many rows, the first of the source; null means all. It may change between epochs."""
    model: TrainModelConfig = key(REQUIRED)
    """The model to train, with its text encoder."""
    lora: LoraConfig = key(LoraConfig)
    """LoRA, instead of training the networks themselves."""
    filters: Filters = key({}, shapes_output=True)
    """Bounds on columns of numbers, of the images or of source.tables: rows outside are filtered, and so are rows
    without a number, unless keep_unknown is true."""
    data: DataConfig = key(DataConfig)
    """The path of samples to the trainers."""
    max_steps: Positive | None = key(550_000)
    """Stop after this many steps; null sets no such limit."""
    max_epochs: Positive | None = key(None)
    """Stop after this many passes over the data; null sets no such limit."""
    max_hours: float | None = key(None, gt=0)
    """Stop, with a checkpoint, after this many hours of training; null sets no such limit."""
    max_cost: float | None = key(None, gt=0)
    """Stop, with a checkpoint, after the hours of all trainers and encoders that this pays for; null sets no limit."""
    prices: PricesConfig = key(PricesConfig)
    """Prices by the hour."""
    phase_2: SecondPhaseConfig = key(SecondPhaseConfig)
    """A second phase."""
    seed: int = key(0, shapes_output=True, ge=0)
    """Seed of everything random; with epoch and row it decides each sample's noise."""
    objective: ObjectiveConfig = key(ObjectiveConfig)
    """The training objective."""
    optimizer: OptimizerConfig = key(OptimizerConfig)
    """The optimizer and its learning rate."""
    ema: EmaConfig = key(EmaConfig)
    """The moving average of the weights."""
    precision: Literal["bf16", "fp32"] = key("bf16", shapes_output=True)
    """The arithmetic of the networks; weights, loss and average stay in fp32."""
    scaling: ScalingConfig = key(ScalingConfig)
    """The number of trainers, and where they run."""
    strategy: StrategyConfig = key(StrategyConfig)
    """The parallelism, and what makes a step faster or smaller."""
    transform: TrainTransformConfig = key(TrainTransformConfig)
    """Decoding, resizing and cropping, if data.mode is not offline."""
    encode: TrainEncodeConfig = key(TrainEncodeConfig)
    """The encoders, if data.mode is not offline."""
    checkpoint: CheckpointConfig = key(CheckpointConfig)
    """Checkpoints: their frequency, and how many are kept."""
    log: LogConfig = key(LogConfig)
    """The metrics that a run writes."""
    evaluate: TrainEvaluateConfig = key(TrainEvaluateConfig)
    """The validation loss during training."""
    samples: SamplesConfig = key(SamplesConfig)
    """Pictures drawn during training."""
    profile: ProfileConfig = key(ProfileConfig)
    """A profile of some steps."""
    max_failures: int = key(3, ge=0)
    """Number of times that trainers may fail and be started again."""

    def settled(self) -> Self:
        if self.lora.rank is not None:
            self = self.replaced(model=self.model.with_defaults(denoiser="pretrained"))
        if self.scaling.accelerator in (None, "cpu"):
            return self
        second = self.phase_2
        sharded = self.scaling.num_workers != 1 and self.optimizer.kind == "adamw"
        return self.replaced(
            data=self.data.with_defaults(
                batch_size=_usual_batch(self.data.resolution),
                global_batch_size=RECIPE_BATCH if self.model.denoiser == "new" else None,
            ),
            strategy=self.strategy.with_defaults(kind="fsdp" if sharded else "ddp", compile=True),
            phase_2=second.with_defaults(batch_size=second.resolution and _usual_batch(second.resolution)),
        )

    @property
    def phases(self) -> tuple["TrainConfig", ...]:
        """The configuration of each phase, in order; the second begins with the weights of the first."""
        second = self.phase_2
        if second.max_steps is None:
            return (self,)
        one, two = (self.output.replaced(uri=f"{self.output.uri.rstrip('/')}/{name}") for name in PHASES)
        changes = {
            "phase_2": SecondPhaseConfig(),
            "source": self.source.replaced(uri=second.source),
            "data": self.data.replaced(
                resolution=second.resolution,
                batch_size=second.batch_size,
                global_batch_size=second.global_batch_size,
            ),
            "objective": self.objective.replaced(skipped_tokens=second.skipped_tokens),
            "output": two,
            "model": self.model.replaced(start_from=one.uri),
            "max_steps": second.max_steps,
            "max_epochs": None,
        }
        # `replaced` would ignore the None.
        return self.replaced(phase_2=SecondPhaseConfig(), output=one), self.model_copy(update=changes)

    @property
    def text_encoded(self) -> bool:
        """True if the captions of images reach the trainers as embeddings."""
        by_encoders = self.data.mode == "online" and not self.model.train_text_encoder
        return (self.encode.text or ("text_embedding" if by_encoders else None)) == "text_embedding"

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if all(limit is None for limit in (self.max_steps, self.max_epochs, self.max_hours)):
            expected = "a whole number while max_epochs is null"
            yield self.problem("max_steps", expected, "set one of them: a run must end")
        if self.max_cost is not None and self.prices.trainer_hour is None:
            yield self.problem("max_cost", "null while prices.trainer_hour is null", "set the price")
        if self.lora.rank is not None and self.model.denoiser == "new":
            hint = "LoRA needs trained weights to start from"
            yield self.problem("model.denoiser", "pretrained while lora.rank is set", hint)
        yield from self._evaluate_contradictions()
        if self.data.mode != "offline" and self.source.also:
            yield self.problem("source.also", f"[] while data.mode is {self.data.mode}", "only latents can be mixed")
        if self.data.mode == "offline":
            of_images = {f"source.{name}": getattr(self.source, name) for name in CaptionedSource.model_fields}
            for path, value in {**of_images, "filters": self.filters}.items():
                if value and path != "source.uri":
                    hint = "latents are made already: set it for sdp process"
                    yield self.problem(path, "nothing while data.mode is offline", hint, "a value")
        if self.model.train_text_encoder and self.encode.text == "text_embedding":
            expected = "token_ids or null while model.train_text_encoder is set"
            hint = "embeddings would be those of the frozen text encoder"
            yield self.problem("encode.text", expected, hint)
        if self.optimizer.kind != "adamw" and self.strategy.kind == "fsdp":
            hint = "it needs whole weights: set strategy.kind: ddp"
            yield self.problem("optimizer.kind", "adamw while strategy.kind is fsdp", hint)
        if self.max_steps is None and self.optimizer.schedule != "constant":
            hint = "set max_steps: the schedule needs a last step"
            yield self.problem("optimizer.schedule", "constant while max_steps is null", hint)

    def _evaluate_contradictions(self) -> Iterable[Problem]:
        if self.evaluate.every_steps is not None and self.evaluate.source is None:
            if self.data.mode != "offline":
                expected = "a latents dataset while data.mode is not offline"
                yield self.problem("evaluate.source", expected, "name one to measure on")
            elif not self.data.holdout:
                expected = "more than 0 while evaluate.every_steps is set and evaluate.source is not"
                hint = "hold out some rows, or name a dataset in evaluate.source"
                yield self.problem("data.holdout", expected, hint)
