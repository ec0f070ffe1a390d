"""What `sdp generate` is told: from prompts and a checkpoint to pictures."""

from collections.abc import Iterable
from typing import Literal

from sdp.config.base import (
    REQUIRED,
    JobConfig,
    Name,
    OutputConfig,
    Positive,
    Resolution,
    Section,
    Uri,
    WorkersConfig,
    key,
)
from sdp.errors import Problem


class PromptSource(Section):
    """Where prompts are read from."""

    uri: Uri | None = key(
        None,
        "A file of prompts, or a folder of such: text, one a line, or Parquet with a caption column; null takes "
        "`prompts`.",
        shapes_output=True,
    )
    caption_column: Name = key("caption", "The column of a Parquet file that holds the prompts.", shapes_output=True)


class GenerateOutput(OutputConfig):
    rows_per_file: Positive = key(
        64,
        "Pictures of one part file: what one generator draws in one go, and what a restart may have to draw again.",
        shapes_output=True,
    )
    image_files: bool = key(True, "Write each picture as images/<row>.png as well, beside the parts that hold it.")
    sheet_prompts: int = key(48, "Prompts that contact-sheet.png shows, from the first; 0 makes no sheet.", ge=0)


class SamplerConfig(Section):
    """How a picture is drawn from noise."""

    scheduler: Literal["ddim", "dpm++", "dpm++_karras", "unipc", "euler", "euler_a", "ddpm"] = key(
        "ddim",
        "The sampler: DDIM, DPM-Solver++ (also with Karras' noise levels), UniPC, Euler, Euler ancestral or DDPM.",
        shapes_output=True,
    )
    steps: Positive = key(50, "Denoising steps of each picture.", shapes_output=True, le=1000)
    guidance_scale: float = key(
        7.5, "How strongly the prompt is followed; 1 is without guidance.", shapes_output=True, ge=1, le=50
    )
    negative_prompt: str = key("", "What the pictures should not show.", shapes_output=True)


class GeneratorConfig(WorkersConfig):
    """The generators and where they are."""

    batch_size: Positive = key(8, "Pictures that a generator draws at once; halved where memory has no room for them.")


class GenerateConfig(JobConfig):
    """Draw pictures for prompts with a trained checkpoint."""

    source: PromptSource = key(PromptSource, "A file of prompts.")
    prompts: tuple[Name, ...] = key((), "Prompts given here instead of in a file.", shapes_output=True)
    output: GenerateOutput = key(REQUIRED, "The pictures to write.")
    checkpoint: Name = key(
        REQUIRED,
        "What to draw with: a checkpoint of sdp train, or a run for its newest one; a folder in diffusers layout; "
        "builtin:tiny; or a hub id with its revision. An output is finished with the checkpoint it was begun with.",
        example="s3://bucket/run/checkpoints/latest",
    )
    weights: Literal["auto", "ema", "raw"] = key(
        "auto",
        "Of a checkpoint: the moving average (ema), the weights as trained (raw), or the average if there is one.",
        shapes_output=True,
    )
    model: Name | None = key(
        None,
        "Where a checkpoint's VAE, text encoder and tokenizer are now; null takes them from where its training did.",
    )
    images_per_prompt: Positive = key(1, "Pictures drawn for each prompt.", shapes_output=True)
    resolution: Resolution = key(512, "Side of the pictures.", shapes_output=True)
    seed: int = key(
        0, "Seed of everything random; with a picture's address it decides that picture.", shapes_output=True, ge=0
    )
    sampler: SamplerConfig = key(SamplerConfig, "How a picture is drawn from noise.")
    precision: Literal["bf16", "fp16", "fp32"] = key(
        "bf16",
        "The arithmetic of the U-Net and the text encoder on a GPU; the VAE, and all of it on a CPU, is fp32.",
        shapes_output=True,
    )
    scaling: GeneratorConfig = key(GeneratorConfig, "The generators and where they are.")

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.prompts and self.source.uri is not None:
            yield Problem("prompts", "an empty list while source.uri is set", "prompts as well", "keep one of the two")
        if not self.prompts and self.source.uri is None:
            yield Problem("prompts", "one or more prompts, here or in a file", "none", "set prompts or source.uri")
