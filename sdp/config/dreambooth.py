"""The configuration of `sdp dreambooth`: from a handful of pictures of one subject to a model that draws it."""

from collections.abc import Iterable
from typing import Literal

from sdp.config.base import REQUIRED, Section, key
from sdp.config.process import ModelConfig
from sdp.config.shared import JobConfig, SourceConfig, WorkersConfig
from sdp.config.types import Name, Positive, Resolution, Uri
from sdp.errors import Problem


class SubjectSource(SourceConfig):
    uri: Uri = key(REQUIRED, shapes_output=True, example="s3://bucket/my-cat")
    """A folder of pictures of the subject."""
    caption: Name = key(REQUIRED, shapes_output=True, example="a photo of unqtkn cat")
    """A caption for the pictures, with a rare word as the subject's name."""


class PriorConfig(Section):
    """Pictures of the subject's class, drawn by the model itself, so that it does not forget the class."""

    prompt: Name | None = key(None, shapes_output=True)
    """Prompt for the class, such as a photo of a cat; null trains without a class."""
    pictures: Positive = key(200, shapes_output=True)
    """Number of pictures to draw."""


class SubjectLoraConfig(Section):
    """LoRA: small matrices trained beside all attention layers, which are frozen."""

    rank: Positive | None = key(None, shapes_output=True)
    """The rank of the matrices, often 4 to 64; null trains the networks themselves."""


class DrawConfig(Section):
    """The pictures that are drawn after training."""

    prompts: tuple[Name, ...] = key(())
    """Prompts to draw, four pictures each; [] draws source.caption."""


class SubjectConfig(Section):
    """Feature networks that measure the similarity of the drawn pictures to the subject's."""

    clip: Name | None = key(None)
    """A CLIP model as transformers saves it, for pictures against their prompts (CLIP-T); null skips it."""
    features: Name | None = key(None)
    """DINO, DINOv2 or CLIP as transformers saves it, for drawn pictures against the subject's; null skips it."""


class DreamboothConfig(JobConfig):
    """Teach a model one subject: encode its pictures, draw its class, train, draw it, and compare."""

    source: SubjectSource = key(REQUIRED)
    """The subject's pictures."""
    model: ModelConfig = key(REQUIRED)
    """The model to start from."""
    prior: PriorConfig = key(PriorConfig)
    """The class of the subject."""
    resolution: Resolution = key(512, shapes_output=True)
    """Side of the pictures in pixels."""
    max_steps: Positive = key(800, shapes_output=True)
    """Training steps."""
    batch_size: Positive = key(2)
    """Samples per step and worker; with a prior, half of them show the subject."""
    learning_rate: float | None = key(None, gt=0)
    """The learning rate; null means 5e-6, or 1e-4 for LoRA."""
    train_text_encoder: bool = key(False, shapes_output=True)
    """Train the text encoder as well: closer to the subject, at the cost of memory."""
    lora: SubjectLoraConfig = key(SubjectLoraConfig)
    """LoRA, instead of training all weights."""
    activation_checkpointing: bool = key(False)
    """Recompute activations in the backward pass, to save memory."""
    precision: Literal["bf16", "fp32"] = key("bf16")
    """Number format of the U-Net's arithmetic."""
    seed: int = key(0, shapes_output=True, ge=0)
    """Seed of everything random."""
    draw: DrawConfig = key(DrawConfig)
    """The pictures drawn after training."""
    evaluate: SubjectConfig = key(SubjectConfig)
    """Their similarity to the subject."""
    scaling: WorkersConfig = key(WorkersConfig)
    """The workers of every step, and their placement."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        prompt = self.prior.prompt
        if self.evaluate.features is not None and prompt is not None and self.prior.pictures < 2:
            yield self.problem("prior.pictures", "2 or more for evaluate to compare", "raise it")
        if prompt is not None and not set(self.source.caption.split()) - set(prompt.split()):
            expected = f"a word that is not in prior.prompt ({prompt!r})"
            hint = "name the subject by a rare word, such as unqtkn"
            yield self.problem("source.caption", expected, hint, repr(self.source.caption))
