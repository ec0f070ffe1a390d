"""What `sdp dreambooth` is told: from a handful of pictures of one subject to a model that draws it."""

from collections.abc import Iterable
from typing import Literal

from sdp.config.base import (
    REQUIRED,
    JobConfig,
    Name,
    Positive,
    Resolution,
    Section,
    SourceConfig,
    TrainersConfig,
    Uri,
    key,
)
from sdp.config.process import ModelConfig
from sdp.config.train import LoraConfig
from sdp.errors import Problem


class SubjectSource(SourceConfig):
    uri: Uri = key(REQUIRED, "A folder of pictures of the subject.", shapes_output=True, example="s3://bucket/my-cat")
    caption: Name = key(
        REQUIRED,
        "What they show, with a rare word as the subject's name.",
        shapes_output=True,
        example="a photo of unqtkn cat",
    )


class PriorConfig(Section):
    """Pictures of the subject's class, drawn by the model itself, that keep it from forgetting the class."""

    prompt: Name | None = key(None, "What to draw, such as a photo of a cat; null trains without.", shapes_output=True)
    pictures: Positive = key(200, "How many to draw.", shapes_output=True)
    weight: float = key(1.0, "What their loss counts for, that of the subject being 1.", shapes_output=True, gt=0)


class DrawConfig(Section):
    """The pictures that are drawn when the subject is learnt."""

    prompts: tuple[Name, ...] = key((), "What to draw; [] draws source.caption.")
    images_per_prompt: Positive = key(4, "Pictures of each prompt.")
    steps: Positive = key(50, "Denoising steps of each picture.", le=1000)
    guidance_scale: float = key(7.5, "How strongly the prompt is followed; 1 is without guidance.", ge=1, le=50)


class SubjectConfig(Section):
    """How near the drawn pictures are to the subject's; by networks that are named, or not at all."""

    clip: Name | None = key(
        None, "A CLIP model as transformers saves it: pictures against their prompts (CLIP-T); null scores none."
    )
    features: Name | None = key(
        None,
        "DINO, DINOv2 or CLIP as transformers saves it: drawn pictures against the subject's; null compares nothing.",
    )


class DreamboothConfig(JobConfig):
    """Teach a model one subject: encode its pictures, draw its class, train, draw it, compare."""

    source: SubjectSource = key(REQUIRED, "The subject's pictures.")
    model: ModelConfig = key(REQUIRED, "The model to begin with.")
    prior: PriorConfig = key(PriorConfig, "The class of the subject.")
    resolution: Resolution = key(512, "Side of the pictures.", shapes_output=True)
    max_steps: Positive = key(800, "Steps of training.", shapes_output=True)
    batch_size: Positive = key(2, "Samples of a step on each worker: with a prior half of them are the subject's.")
    learning_rate: float | None = key(None, "The learning rate; null takes 5e-6, and 1e-4 for LoRA.", gt=0)
    train_text_encoder: bool = key(
        False, "Train the text encoder as well: nearer to the subject, for more memory.", shapes_output=True
    )
    optimizer: Literal["adamw", "adamw_8bit"] = key(
        "adamw",
        "AdamW, or the same with its averages in 8 bits (adamw_8bit): less memory; needs torchao.",
        shapes_output=True,
    )
    lora: LoraConfig = key(LoraConfig, "LoRA, in place of training the networks themselves.")
    activation_checkpointing: bool = key(False, "Compute activations again in the backward pass: less memory.")
    precision: Literal["bf16", "fp16", "fp32"] = key("bf16", "The arithmetic of the U-Net.")
    seed: int = key(0, "Seed of everything random.", shapes_output=True, ge=0)
    draw: DrawConfig = key(DrawConfig, "The pictures at the end.")
    evaluate: SubjectConfig = key(SubjectConfig, "How near they are to the subject.")
    scaling: TrainersConfig = key(TrainersConfig, "The workers of every step, and where they are.")

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        prompt = self.prior.prompt
        if prompt is not None and not set(self.source.caption.split()) - set(prompt.split()):
            yield Problem(
                "source.caption",
                f"a word that prior.prompt ({prompt!r}) has not",
                repr(self.source.caption),
                "name the subject by a rare word, such as unqtkn",
            )
