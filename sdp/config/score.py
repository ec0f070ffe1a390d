"""The configuration of `sdp score`: from pictures to a dataset of their scores."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from sdp.config.base import REQUIRED, Section, key
from sdp.config.process import EncoderConfig, ProcessSource, TransformWorkersConfig
from sdp.config.shared import JobConfig, OutputConfig
from sdp.config.types import Name, Positive, Uri
from sdp.errors import Problem


class ScoreOutput(OutputConfig):
    rows_per_file: Positive = key(65_536, shapes_output=True)
    """Source rows per part file."""


class DuplicatesConfig(Section):
    """Near-duplicates: pictures whose perceptual hashes are alike."""

    distance: Annotated[int, Field(ge=0, le=3)] | None = key(2)
    """The most bits of 64 in which the hashes of near-duplicates differ; null looks for none."""


class ScoresConfig(Section):
    """The scores to compute."""

    clip_model: Name | None = key(None, shapes_output=True, example="s3://bucket/clip-vit-large-patch14")
    """A CLIP model in transformers layout: a local or s3:// folder, or a hub id with its revision; null computes
    neither similarity nor aesthetics."""
    aesthetics: Uri | None = key(None, example="s3://bucket/sac+logos+ava1-l14-linearMSE.pth")
    """The weights of a predictor of aesthetics: linear layers (.safetensors or .pth) that are applied one after another
    to the normalised embedding of clip_model; null predicts none."""
    duplicates: DuplicatesConfig = key(DuplicatesConfig)
    """Near-duplicates."""

    def contradictions(self) -> Iterable[Problem]:
        if self.aesthetics is not None and self.clip_model is None:
            yield self.problem("clip_model", "the CLIP model that aesthetics was trained with", "name it")
        if self.clip_model is None and self.duplicates.distance is None:
            yield self.problem("clip_model", "a CLIP model, or a duplicates.distance", "set one of them", "neither")


class ScoreEncodeConfig(EncoderConfig):
    """The encoders, which run CLIP."""

    dtype: Literal["bf16", "fp16", "fp32"] = key("bf16", shapes_output=True)
    """Precision of CLIP; scores are always computed and stored as fp32."""
    batch_size: Positive = key(256)
    """Images per encoder batch. Halved automatically where memory is short."""


class ScoreConfig(JobConfig):
    """Score pictures: aesthetics, similarity to their captions, and near-duplicates."""

    source: ProcessSource = key(REQUIRED)
    """The pictures to score."""
    output: ScoreOutput = key(REQUIRED)
    """The dataset of scores to write."""
    score: ScoresConfig = key(ScoresConfig)
    """The scores to compute."""
    seed: int = key(0, shapes_output=True, ge=0)
    """Random seed, by which a row draws one of several captions: that of process."""
    transform: TransformWorkersConfig = key(TransformWorkersConfig)
    """Decoding, hashing, resizing and cropping."""
    encode: ScoreEncodeConfig = key(ScoreEncodeConfig)
    """The encoders."""
