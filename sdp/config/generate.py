"""The configuration of `sdp generate`: from prompts and a checkpoint to pictures."""

from collections.abc import Iterable
from typing import Literal

from sdp.config.base import REQUIRED, Section, key
from sdp.config.shared import JobConfig, OutputConfig, WorkersConfig
from sdp.config.types import Name, Positive, Resolution, Uri
from sdp.errors import Problem


class PromptSource(Section):
    """A source of prompts."""

    uri: Uri | None = key(None, shapes_output=True)
    """A file or folder of prompts: text with one per line, or Parquet with a caption column; null uses `prompts`."""
    caption_column: Name = key("caption", shapes_output=True)
    """The column of a Parquet file that holds the prompts."""


class GenerateOutput(OutputConfig):
    rows_per_file: Positive = key(64, shapes_output=True)
    """Pictures per part file; a restart repeats the parts that were not finished."""
    image_files: bool = key(True)
    """Also write each picture as images/<row>.png, beside the part that holds it."""


Scheduler = Literal["ddim", "dpm++", "dpm++_karras", "unipc", "euler", "euler_a", "ddpm"]


class SamplerConfig(Section):
    """The sampling loop from noise to a picture."""

    scheduler: Scheduler = key("ddim", shapes_output=True)
    """Sampler: DDIM, DPM-Solver++ (also with Karras' noise levels), UniPC, Euler, Euler ancestral or DDPM. For a flow,
    ddim means Euler's steps, and the others are refused."""
    steps: Positive = key(50, shapes_output=True, le=1000)
    """Denoising steps of each picture."""
    guidance_scale: float = key(7.5, shapes_output=True, ge=1, le=50)
    """Weight of the prompt (classifier-free guidance); 1 means no guidance."""
    negative_prompt: str = key("", shapes_output=True)
    """Text that guidance steers away from."""


class GeneratorConfig(WorkersConfig):
    """The number and placement of the generators."""

    batch_size: Positive = key(8)
    """Pictures per generator batch; halved where memory is short."""


class GenerateConfig(JobConfig):
    """Draw pictures for prompts with a trained checkpoint."""

    source: PromptSource = key(PromptSource)
    """A file of prompts."""
    prompts: tuple[Name, ...] = key((), shapes_output=True)
    """Prompts given here instead of in a file."""
    output: GenerateOutput = key(REQUIRED)
    """The pictures to write."""
    checkpoint: Name = key(REQUIRED, example="s3://bucket/run/checkpoints/latest")
    """A checkpoint of sdp train, or a run for its newest one; a folder in diffusers layout; builtin:tiny; or a hub id
    with its revision. An output is finished with the checkpoint that began it."""
    weights: Literal["auto", "ema", "raw"] = key("auto", shapes_output=True)
    """Which weights of a checkpoint: the moving average (ema), those trained (raw), or the average if there is one
    (auto)."""
    model: Name | None = key(None)
    """The source of a checkpoint's VAE, text encoder and tokenizer; null uses that of its training."""
    images_per_prompt: Positive = key(1, shapes_output=True)
    """Pictures drawn for each prompt."""
    resolution: Resolution = key(512, shapes_output=True)
    """Side of the pictures in pixels; the default for a checkpoint of sdp train is that of its training."""
    seed: int = key(0, shapes_output=True, ge=0)
    """Random seed; with a picture's address it decides that picture."""
    sampler: SamplerConfig = key(SamplerConfig)
    """The sampling loop from noise to a picture."""
    precision: Literal["bf16", "fp16", "fp32"] = key("bf16", shapes_output=True)
    """Precision of the U-Net and the text encoder on a GPU; the VAE, and everything on a CPU, uses fp32."""
    scaling: GeneratorConfig = key(GeneratorConfig)
    """The number and placement of the generators."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.prompts and self.source.uri is not None:
            expected = "an empty list while source.uri is set"
            yield self.problem("prompts", expected, "remove one of them", "prompts as well")
        if not self.prompts and self.source.uri is None:
            yield self.problem("prompts", "one or more prompts, here or in a file", "set prompts or source.uri", "none")
