"""What `sdp train` is told. The defaults are the recipe of Stable Diffusion v2-base at 256 pixels."""

from collections.abc import Iterable
from typing import Literal

from sdp.config.base import (
    LONGEST_S,
    REQUIRED,
    JobConfig,
    Name,
    OutputConfig,
    Positive,
    Resolution,
    Section,
    SourceConfig,
    TrainersConfig,
    Uri,
    Workers,
    key,
)
from sdp.config.process import EncoderConfig, ModelConfig, TransformConfig
from sdp.errors import Problem


class ColumnsConfig(Section):
    """What the columns of a latents dataset are called, where that is not as sdp process calls them.

    With these set, plain Parquet files are a dataset, too: lists or Ray's tensors of numbers, such as fp32 latents.
    """

    latents: Name | None = key(
        None,
        "The column of latents; {resolution} in it stands for data.resolution. null takes latents_{resolution} or "
        "moments_{resolution}.",
        shapes_output=True,
        example="image_latents_{resolution}",
    )
    text: tuple[Name, ...] = key(
        (),
        "The columns of text, as token ids or embeddings: of several, one is drawn for each sample. [] takes token_ids "
        "or text_embedding.",
        shapes_output=True,
    )
    factor: float | None = key(
        None,
        "What stored numbers are multiplied by: 1 where the latents are scaled already, 0.18215 where they are as the "
        "VAE of Stable Diffusion 2 gave them. null takes 1, and refuses latents that look unscaled.",
        shapes_output=True,
        gt=0,
    )


class MixedSource(Section):
    """A further latents dataset."""

    uri: Uri = key(REQUIRED, "The dataset.", shapes_output=True)
    weight: float = key(REQUIRED, "Its samples for each sample of source.uri.", shapes_output=True, gt=0)
    columns: ColumnsConfig = key(ColumnsConfig, "What its columns are called.")


class TrainSource(SourceConfig):
    uri: Uri = key(
        REQUIRED,
        "The dataset to train on: latents where data.mode is offline, images where it is online or collocated.",
        shapes_output=True,
        example="s3://bucket/latents",
    )
    columns: ColumnsConfig = key(ColumnsConfig, "What the columns of a latents dataset are called.")
    also: tuple[MixedSource, ...] = key(
        (),
        "Further latents datasets to mix in, each {uri, weight, columns}: weight is how many of its samples there are "
        "for each sample of source.uri. An epoch is a pass over source.uri.",
        shapes_output=True,
    )

    def contradictions(self) -> Iterable[Problem]:
        uris = [self.uri, *(other.uri for other in self.also)]
        for number, other in enumerate(self.also):
            if uris.index(other.uri) <= number:
                yield Problem(f"also.{number}.uri", "each dataset once", repr(other.uri), "raise its weight instead")


class ShuffleConfig(Section):
    """The order of an epoch. It is drawn from the seed and the epoch; these decide how far rows are torn apart."""

    lanes: Positive = key(
        16,
        "Sequences that an epoch reads side by side; as many as trainers where these are more when it begins. Trainers "
        "whose number divides it read no row group twice.",
        shapes_output=True,
    )
    units: Positive = key(4, "Part files whose row groups are mixed with each other.", shapes_output=True)
    row_groups: Positive = key(4, "Row groups of a lane whose rows are permuted together.", shapes_output=True)


class DataConfig(Section):
    """How samples reach the trainers."""

    mode: Literal["offline", "online", "collocated"] = key(
        "offline",
        "Read latents made before (offline), encode on other nodes meanwhile (online), or encode on the training "
        "GPUs (collocated).",
        shapes_output=True,
    )
    resolution: Resolution = key(256, "Side of the square pictures to train on.", shapes_output=True)
    batch_size: Positive = key(128, "Samples that one worker takes at once: what fits into a GPU's memory.")
    global_batch_size: Positive | None = key(
        None,
        "Samples of a step over all workers, in as many rounds of batch_size as that takes; null is one round.",
        shapes_output=True,
    )
    trust_encoder: bool = key(
        False, "Train although the dataset's latents were made by another model source than model.source."
    )
    holdout: float = key(
        0.0,
        "Share of addresses, chosen by their hash, that are never trained on.",
        shapes_output=True,
        ge=0,
        lt=1,
    )
    shuffle: ShuffleConfig = key(ShuffleConfig, "The order of an epoch.")
    readers: Positive = key(
        4,
        "What reads ahead for each trainer: threads where mode is offline, processes where it is collocated.",
    )
    ahead: Positive = key(4, "Batches in each trainer that are ready before they are needed.")


class TrainTransformConfig(TransformConfig):
    """From images to squares on CPU, where data.mode is online or collocated."""

    crop: Literal["center", "random"] = key(
        "center",
        "What to take of an image: the square in its middle, or one at random, drawn anew in each epoch.",
        shapes_output=True,
    )


class TrainEncodeConfig(EncoderConfig):
    """The encoders, where data.mode is online (each an actor of its own) or collocated (one in each trainer).

    They hand over the mean and variance of the VAE's distribution; the trainer draws its sample in each epoch.
    """

    num_workers: Workers = key(
        1,
        "How many encoders (online); or a range, from which a run takes as many as the trainers' pace needs: it starts "
        "with min, measures both, and chooses once.",
    )
    batch_size: Positive | None = key(
        None,
        "Images that an encoder takes at once; null takes 64 at 256 px, a quarter at twice the side. Halved by itself "
        "where memory is short.",
    )
    text: Literal["token_ids", "text_embedding"] | None = key(
        None,
        "Who runs the text encoder: the encoders (text_embedding: 158 kB of text a row to send, with SD2) or the "
        "trainers (token_ids: 154 bytes); null takes the encoders where data.mode is online and "
        "model.train_text_encoder is false, else the trainers.",
    )


class ObjectiveConfig(Section):
    """What the model learns to predict."""

    prediction: Literal["epsilon", "v"] | None = key(
        None,
        "Predict the noise (epsilon, as 512-base does) or the velocity (v, as 768 does); null takes what "
        "model.start_from, or else model.source, was trained for.",
        shapes_output=True,
    )
    caption_dropout: float = key(
        0.1,
        "Share of samples, drawn anew each step, whose caption is replaced by the empty string.",
        shapes_output=True,
        ge=0,
        le=1,
    )
    min_snr_gamma: float | None = key(
        None,
        "Cap on the signal-to-noise ratio that a timestep counts for, often 5; null caps nothing.",
        shapes_output=True,
        gt=0,
    )
    offset_noise: float = key(
        0.0, "Strength of noise that is the same over a whole channel, often 0.1.", shapes_output=True, ge=0
    )
    zero_terminal_snr: bool = key(
        False, "Stretch the noise schedule until nothing of the picture is left at its end.", shapes_output=True
    )

    def contradictions(self) -> Iterable[Problem]:
        if self.zero_terminal_snr and self.prediction == "epsilon":
            yield Problem(
                "prediction",
                "v while zero_terminal_snr is on",
                "'epsilon'",
                "where no signal is left, the noise tells the model nothing",
            )


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    kind: Literal["adamw", "adamw_8bit"] = key(
        "adamw",
        "AdamW, or the same with both averages in 8 bits: 2 bytes a weight in place of 8; needs torchao, and ddp.",
        shapes_output=True,
    )
    learning_rate: float = key(1e-4, "The learning rate after the warm-up; it may change from job to job.", gt=0)
    schedule: Literal["constant", "cosine", "linear"] = key(
        "constant",
        "What the learning rate does after the warm-up; cosine and linear end at max_steps.",
        shapes_output=True,
    )
    warmup_steps: int = key(10_000, "Steps over which the learning rate rises from zero; they may change.", ge=0)
    beta1: float = key(0.9, "AdamW's decay of the gradient's mean.", shapes_output=True, ge=0, lt=1)
    beta2: float = key(0.999, "AdamW's decay of the gradient's square.", shapes_output=True, ge=0, lt=1)
    epsilon: float = key(1e-8, "AdamW's guard against dividing by zero.", shapes_output=True, gt=0)
    weight_decay: float = key(0.01, "AdamW's weight decay.", shapes_output=True, ge=0)
    clip_norm: float | None = key(
        None, "Scale gradients down to this norm where they exceed it; null leaves them. It may change.", gt=0
    )


class EmaConfig(Section):
    """The moving average of the weights, which generation uses."""

    decay: float | None = key(
        0.9999,
        "Decay of the average in a step, reached from lower ones; null keeps none.",
        shapes_output=True,
        ge=0,
        lt=1,
    )


class GuardConfig(Section):
    """What is done about steps that would harm the model."""

    bad_steps: Positive = key(
        20, "Steps in a row without a finite loss and gradient, all skipped, after which the job stops."
    )
    spike: float | None = key(
        None,
        "Skip a step whose gradient norm is so many times the usual one; null skips none. It may change.",
        gt=1,
    )


class ScalingConfig(TrainersConfig):
    """How many trainers there are, and where."""

    in_driver: bool = key(
        False,
        "Train in the driver's own process, without Ray: one worker that starts at once, and that only running the job "
        "again starts again.",
    )
    can_grow: bool = key(
        False, "Nodes are added on demand: wait for trainers that the cluster has no room for yet, rather than refuse."
    )

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.in_driver and self.num_workers != 1:
            yield Problem("num_workers", "1 while in_driver is on", repr(self.num_workers), "a driver is one process")
        if self.in_driver and self.gpus_per_worker > 1:
            yield Problem("gpus_per_worker", "1 while in_driver is on", str(self.gpus_per_worker), "train on Ray")
        for name in ("accelerator", "use_gpu") if self.in_driver else ():
            if (value := getattr(self, name)) is not None:
                got = repr(value).lower() if value in (True, False) else repr(value)
                yield Problem(name, "null while in_driver is on", got, "a driver takes what its machine has")


class Fp8Config(Section):
    """The U-Net's linear layers in fp8, on GPUs that have it (L4, L40S, H100 and later); the rest stays in bf16."""

    enabled: bool = key(False, "Compute large linear layers in fp8; needs torchao, and compile to be of use.")
    min_features: Positive = key(
        1024,
        "Linear layers with fewer inputs or outputs stay in bf16: casting them takes longer than fp8 saves.",
    )
    emulate: bool = key(
        False, "Round as fp8 does but compute in fp32, on any device: slow, to see what it does to a run."
    )

    def contradictions(self) -> Iterable[Problem]:
        if self.emulate and not self.enabled:
            yield Problem("emulate", "false while enabled is false", "true", "set enabled as well")


class StrategyConfig(Section):
    """How trainers share the work."""

    kind: Literal["ddp", "fsdp"] = key("ddp", "Keep the whole state on each GPU (ddp) or a share of it (fsdp).")
    shard: Literal["shard_grad_op", "full_shard", "hybrid"] = key(
        "shard_grad_op",
        "What fsdp shards: all but the weights between forward and backward, the weights as well, or all but the "
        "weights within a node with replicas across nodes.",
    )
    half_gradients: bool = key(
        False, "Exchange gradients in bf16 with ddp: half the bytes, and sums that are rounded; fsdp adds up in fp32."
    )
    compile: bool = key(False, "Compile the U-Net's blocks; the first steps take longer.")
    activation_checkpointing: bool = key(
        False, "Compute activations again in the backward pass instead of keeping them: less memory, more time."
    )
    channels_last: bool = key(False, "Lay images out channels last; with ddp the convolutions' weights as well.")
    fp8: Fp8Config = key(Fp8Config, "The U-Net's linear layers in fp8.")

    def contradictions(self) -> Iterable[Problem]:
        if self.half_gradients and self.kind == "fsdp":
            yield Problem("half_gradients", "false while kind is fsdp", "true", "fsdp adds gradients up in fp32")


class CheckpointConfig(Section):
    """When the run is saved."""

    every_steps: Positive = key(1000, "Steps from one checkpoint to the next.")
    keep_last: Positive = key(3, "Checkpoints to keep, from the newest; older ones are deleted.")
    keep_every: Positive | None = key(
        None, "Keep every checkpoint whose step is a multiple of this for ever; null keeps none but the last."
    )
    keep_best: int = key(0, "Checkpoints to keep by the lowest smoothed loss, beside the newest ones.", ge=0)


class WandbConfig(Section):
    """Weights & Biases, whose library is not part of sdp: add it to the image. Its key comes from WANDB_API_KEY."""

    project: Name | None = key(None, "The project to tell each line of the metrics to; null tells none.")


class LogConfig(Section):
    """What is written down about the run while it goes on."""

    every_steps: Positive = key(10, "Steps from one line of the metrics to the next.")
    tensorboard: bool = key(False, "Write OUTPUT/tensorboard as well: what TensorBoard reads.")
    wandb: WandbConfig = key(WandbConfig, "Weights & Biases.")
    metrics_port: int | None = key(
        None,
        "Offer Prometheus its metrics on this port where scaling.in_driver is true; with Ray they are on Ray's port.",
        ge=1,
        le=65535,
    )


class ProfileConfig(Section):
    """Where an iteration's time and memory goes: torch's profiler on the first trainer, to OUTPUT/profile."""

    steps: Positive | None = key(
        None,
        "Profile so many steps; null profiles none. All trainers stand still for some seconds when it is written.",
    )
    start: Positive = key(10, "Steps of this job to let pass first: the first ones compile and warm up.")


class TrainEvaluateConfig(Section):
    """The loss on rows that are not trained on, by timestep, while training goes on: every time of the same rows with
    the same noise. All trainers measure their share of it and stand still meanwhile."""

    every_steps: Positive | None = key(None, "Steps from one measuring to the next; null measures none.")
    source: Uri | None = key(
        None,
        "A latents dataset, of which all rows count; null takes what data.holdout keeps of the training's own.",
        example="s3://bucket/validation-latents",
    )
    rows: Positive = key(1024, "How many rows to take.")
    buckets: Positive = key(10, "Ranges of timesteps, in each of which every row is noised once.", le=1000)


class SamplesConfig(Section):
    """Pictures drawn while training goes on: by the first trainer, a little after each step, so that training is
    slowed by no more than its share. They are of the moving average if there is one."""

    every_steps: Positive | None = key(
        None, "Steps from one set of pictures to the next, in OUTPUT/samples; null draws none."
    )
    prompts: tuple[Name, ...] = key((), "What to draw: a picture for each prompt, always from the same noise.")
    share: float = key(
        0.05,
        "Share of the time that drawing may take; as long as a set is not done, none is begun.",
        gt=0,
        le=0.5,
    )
    steps: Positive = key(25, "Denoising steps of each picture.", le=1000)
    guidance_scale: float = key(7.5, "How strongly the prompt is followed; 1 is without guidance.", ge=1, le=50)
    batch_size: Positive = key(4, "Pictures drawn at once: each takes memory beside training's.")

    def contradictions(self) -> Iterable[Problem]:
        if self.every_steps is not None and not self.prompts:
            yield Problem("prompts", "one or more prompts while every_steps is set", "none", "say what to draw")


class TrainModelConfig(ModelConfig):
    source: Name = key(
        REQUIRED,
        "The model to train: builtin:tiny, a local or s3:// folder in diffusers layout, or a hub id with its revision.",
        shapes_output=True,
        example="builtin:tiny",
    )
    unet: Literal["new", "pretrained"] = key(
        "new", "Begin with new weights, drawn from the seed, or with those of the source.", shapes_output=True
    )
    train_text_encoder: bool = key(
        False,
        "Train the text encoder as well, from the source's weights; datasets must hold token ids.",
        shapes_output=True,
    )
    start_from: Uri | None = key(
        None,
        "A checkpoint of another run, whose weights and average this one begins with (the second phase of a training).",
        shapes_output=True,
        example="s3://bucket/phase-1/checkpoints/step-000550000",
    )
    start_optimizer: bool = key(
        False, "Begin with the averages of AdamW of model.start_from as well.", shapes_output=True
    )

    def contradictions(self) -> Iterable[Problem]:
        if self.start_optimizer and self.start_from is None:
            yield Problem("start_optimizer", "false while start_from is null", "true", "set start_from")


class LoraConfig(Section):
    """LoRA: small matrices that are learnt beside some linear layers of what is trained, which stay as they are."""

    rank: Positive | None = key(
        None, "Their inner size, often 4 to 64; null trains the networks themselves.", shapes_output=True
    )
    alpha: float | None = key(
        None, "What they add is multiplied by alpha / rank; null takes the rank.", shapes_output=True, gt=0
    )
    targets: tuple[Name, ...] = key(
        ("to_q", "to_k", "to_v", "to_out.0"),
        "Ends of the names of the U-Net's layers that get one; these are all of attention.",
        shapes_output=True,
    )
    text_targets: tuple[Name, ...] = key(
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        "The same of the text encoder's layers, where model.train_text_encoder is set.",
        shapes_output=True,
    )

    @property
    def scale(self) -> float:
        """What the matrices' product is multiplied by."""
        return 1.0 if self.alpha is None or self.rank is None else self.alpha / self.rank

    def contradictions(self) -> Iterable[Problem]:
        for name, example in (("targets", "to_q"), ("text_targets", "q_proj")):
            if not getattr(self, name):
                yield Problem(name, "one or more ends of names", "none", f"name some, such as {example}")


class SecondPhaseConfig(Section):
    """A second phase, often at a higher resolution: a run of its own, in OUTPUT/phase-2, that begins with the weights
    and the average of the first, in OUTPUT/phase-1. What is not said here is as in the first."""

    max_steps: Positive | None = key(None, "Steps of the second phase; null has none.", shapes_output=True)
    resolution: Resolution | None = key(None, "Its data.resolution; null keeps it.", shapes_output=True)
    batch_size: Positive | None = key(None, "Its data.batch_size; null keeps it.")
    global_batch_size: Positive | None = key(None, "Its data.global_batch_size; null keeps it.", shapes_output=True)
    source: Uri | None = key(None, "Its source.uri; null keeps it.", shapes_output=True, example="s3://bucket/latents")
    learning_rate: float | None = key(None, "Its optimizer.learning_rate; null keeps it.", gt=0)
    warmup_steps: int | None = key(None, "Its optimizer.warmup_steps; null keeps it.", ge=0)
    keep_optimizer: bool = key(
        False, "Begin with AdamW's averages of the first phase rather than with fresh ones.", shapes_output=True
    )

    def contradictions(self) -> Iterable[Problem]:
        said = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if self.max_steps is None and said:
            yield Problem("max_steps", "a whole number", "null", "say how long the second phase is, or remove the rest")


class PricesConfig(Section):
    """What an hour costs, for what a run has cost so far, what it will have cost at its end, and for max_cost."""

    trainer_hour: float | None = key(
        None, "Of one trainer with its GPUs, in any currency; null takes trainer_instance's, or counts no cost.", ge=0
    )
    encoder_hour: float | None = key(
        None, "Of one encoder with its GPU (online); null takes encoder_instance's, or counts none.", ge=0
    )
    trainer_instance: Name | None = key(
        None,
        "The instance type that trainers run on, whose share of sdp plan's price on demand (USD) counts for each GPU; "
        "the chart takes it from the group's node selector.",
        example="p4de.24xlarge",
    )
    encoder_instance: Name | None = key(None, "The same of encoders.", example="g5.2xlarge")


class TrainConfig(JobConfig):
    """Train a model from latents or images, and continue from its last checkpoint when run again."""

    source: TrainSource = key(REQUIRED, "The dataset to train on.")
    output: OutputConfig = key(REQUIRED, "The run: its checkpoints, events and metrics.")
    limit: Positive | None = key(
        None, "How many rows of the source to take, from its first; null takes them all. Between epochs it may change."
    )
    model: TrainModelConfig = key(REQUIRED, "The model to train, with its text encoder.")
    lora: LoraConfig = key(LoraConfig, "LoRA, in place of training the networks themselves.")
    data: DataConfig = key(DataConfig, "How samples reach the trainers.")
    max_steps: Positive | None = key(550_000, "Stop after this many steps; null goes by max_epochs alone.")
    max_epochs: Positive | None = key(
        None, "Stop after this many passes over the data, if max_steps does not come first; null sets no such bound."
    )
    max_samples: Positive | None = key(None, "Stop after this many samples; null does not count them.")
    max_hours: float | None = key(
        None,
        "Stop, with a checkpoint, when the run has trained for so many hours; null does not look at the clock.",
        gt=0,
    )
    max_cost: float | None = key(
        None, "Stop, with a checkpoint, when the run has cost so much, by its prices; null does not count.", gt=0
    )
    prices: PricesConfig = key(PricesConfig, "What an hour costs.")
    phase_2: SecondPhaseConfig = key(SecondPhaseConfig, "A second phase.")
    seed: int = key(
        0, "Seed of everything random; with epoch and row it decides each sample's noise.", shapes_output=True, ge=0
    )
    objective: ObjectiveConfig = key(ObjectiveConfig, "What the model learns to predict.")
    optimizer: OptimizerConfig = key(OptimizerConfig, "AdamW and its learning rate.")
    ema: EmaConfig = key(EmaConfig, "The moving average of the weights.")
    guard: GuardConfig = key(GuardConfig, "What is done about steps that would harm the model.")
    precision: Literal["bf16", "fp16", "fp32"] = key(
        "bf16", "The arithmetic of what is trained; weights, loss and average stay in fp32.", shapes_output=True
    )
    scaling: ScalingConfig = key(ScalingConfig, "How many trainers, and where.")
    strategy: StrategyConfig = key(StrategyConfig, "How trainers share the work.")
    transform: TrainTransformConfig = key(
        TrainTransformConfig, "From images to squares, where data.mode is not offline."
    )
    encode: TrainEncodeConfig = key(TrainEncodeConfig, "The encoders, where data.mode is not offline.")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "When the run is saved.")
    log: LogConfig = key(LogConfig, "What is written down while the run goes on.")
    evaluate: TrainEvaluateConfig = key(TrainEvaluateConfig, "The loss on rows that are not trained on.")
    samples: SamplesConfig = key(SamplesConfig, "Pictures drawn while training goes on.")
    profile: ProfileConfig = key(ProfileConfig, "Where an iteration's time and memory goes.")
    max_failures: int = key(3, "Failures of trainers that are survived before the job gives up.", ge=0)
    watchdog_s: float | None = key(
        1800.0,
        "Seconds without a step after which the trainers' stacks are saved and they are started again; null waits.",
        gt=0,
        le=LONGEST_S,
    )

    @property
    def text_encoded(self) -> bool:
        """Whether images' captions reach the trainers as embeddings."""
        by_encoders = self.data.mode == "online" and not self.model.train_text_encoder
        return (self.encode.text or ("text_embedding" if by_encoders else None)) == "text_embedding"

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if all(limit is None for limit in (self.max_steps, self.max_epochs, self.max_samples, self.max_hours)):
            yield Problem(
                "max_steps", "a whole number while max_epochs is null", "null", "set one of them: a run must end"
            )
        if self.max_cost is not None and self.prices.trainer_hour is None and self.prices.trainer_instance is None:
            yield Problem("max_cost", "null while prices.trainer_hour is null", repr(self.max_cost), "set the price")
        if self.evaluate.every_steps is not None and self.evaluate.source is None:
            if self.data.mode != "offline":
                yield Problem(
                    "evaluate.source",
                    "a latents dataset while data.mode is not offline",
                    "null",
                    "name one to measure on",
                )
            elif not self.data.holdout:
                yield Problem(
                    "data.holdout",
                    "more than 0 while evaluate.every_steps is set and evaluate.source is not",
                    "0.0",
                    "keep some rows, or name a dataset in evaluate.source",
                )
        if self.precision == "fp16" and self.strategy.kind == "fsdp":
            yield Problem("precision", "bf16 or fp32 while strategy.kind is fsdp", "'fp16'", "take bf16")
        if self.strategy.fp8.enabled and self.precision != "bf16":
            yield Problem(
                "strategy.fp8.enabled", f"false while precision is {self.precision}", "true", "set precision to bf16"
            )
        if self.lora.rank is not None:
            while_set = "while lora.rank is set"
            if self.model.unet == "new":
                hint = "LoRA is learnt beside weights that have learnt something"
                yield Problem("model.unet", f"pretrained {while_set}", "'new'", hint)
            if self.strategy.fp8.enabled:
                yield Problem("strategy.fp8.enabled", f"false {while_set}", "true", "set it to false")
        if self.data.mode != "offline":
            mode = f"while data.mode is {self.data.mode}"
            if self.source.also:
                yield Problem("source.also", f"[] {mode}", "a list", "only latents can be mixed")
        if self.model.train_text_encoder and self.encode.text == "text_embedding":
            what = "token_ids or null while model.train_text_encoder is set"
            yield Problem("encode.text", what, "'text_embedding'", "trainers encode with what they have learned")
        if self.optimizer.kind == "adamw_8bit" and self.strategy.kind == "fsdp":
            hint = "fsdp shares the averages among its workers"
            yield Problem("optimizer.kind", "adamw while strategy.kind is fsdp", "'adamw_8bit'", hint)
        if self.scaling.gpus_per_worker > 1 and self.strategy.kind == "fsdp":
            hint = "fsdp shares both networks among all GPUs as it is"
            yield Problem("scaling.gpus_per_worker", "1 while strategy.kind is fsdp", "2", hint)
        if self.scaling.in_driver and self.strategy.kind == "fsdp":
            yield Problem("strategy.kind", "ddp while scaling.in_driver is true", "'fsdp'", "one process has no shards")
        if self.scaling.in_driver and self.data.mode == "online":
            yield Problem(
                "scaling.in_driver", "false while data.mode is online", "true", "its encoders are Ray's; or collocated"
            )
        if self.max_steps is None and self.optimizer.schedule != "constant":
            yield Problem(
                "optimizer.schedule",
                "constant while max_steps is null",
                repr(self.optimizer.schedule),
                "set max_steps: the learning rate needs an end to fall to",
            )
