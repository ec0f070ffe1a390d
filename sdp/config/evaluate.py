"""The configuration of `sdp evaluate`: the quality of pictures, and a checkpoint's loss on held-out data."""

from collections.abc import Iterable
from typing import Literal

from sdp.config.base import REQUIRED, Section, key
from sdp.config.shared import JobConfig, OutputConfig, WorkersConfig
from sdp.config.types import Name, Positive, Uri
from sdp.errors import Problem


class ReferenceSource(Section):
    """The pictures to compare with."""

    uri: Uri | None = key(None, example="s3://bucket/images")
    """The pictures: a dataset of sdp generate or sdp download, Parquet files, or a folder of picture files; null means
    none."""
    image_column: Name = key("image")
    """The column that holds the encoded pictures."""


class PictureSource(ReferenceSource):
    """The pictures to judge."""

    caption_column: Name | None = key(None)
    """The column that holds the captions; null means prompt for pictures of sdp generate, else caption."""


class ClipConfig(Section):
    """The CLIP score: how well pictures match their captions."""

    model: Name | None = key(None)
    """A CLIP model in transformers layout: a local or s3:// folder, or a hub id with its revision; null computes no
    score."""


class FeaturesConfig(Section):
    """The network whose features are compared for FID and KID."""

    model: Name | None = key(None)
    """A folder (local, s3:// or on the hub) with FID's Inception weights (pt_inception-2015-12-05-6726825d.pth), or
    with CLIP, DINO or DINOv2 in transformers layout; null compares nothing."""


class LossConfig(Section):
    """The denoising loss of a checkpoint, by timestep, on latents that it was not trained on."""

    checkpoint: Name | None = key(None)
    """A checkpoint of sdp train, or a run for its newest one; null measures no loss."""
    weights: Literal["auto", "ema", "raw"] = key("auto")
    """The moving average (ema), the weights trained (raw), or the average if there is one (auto)."""
    model: Name | None = key(None)
    """The source of the model that training started from; null uses that of training."""
    source: Uri | None = key(None)
    """A latents dataset, all rows of which may be used; null uses the rows that training held out (data.holdout)."""
    rows: Positive = key(1024)
    """Number of rows to use."""


class EvaluateConfig(JobConfig):
    """Measure the quality of pictures (CLIP score, FID, KID), and a checkpoint's loss on held-out data."""

    source: PictureSource = key(PictureSource)
    """The pictures to judge."""
    reference: ReferenceSource = key(ReferenceSource)
    """The pictures to compare with."""
    output: OutputConfig = key(REQUIRED)
    """The folder for evaluation.json."""
    clip: ClipConfig = key(ClipConfig)
    """The CLIP score."""
    features: FeaturesConfig = key(FeaturesConfig)
    """The network whose features FID and KID compare."""
    loss: LossConfig = key(LossConfig)
    """The denoising loss on held-out latents."""
    scaling: WorkersConfig = key(WorkersConfig)
    """The number and placement of the evaluators."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.source.uri is None and self.loss.checkpoint is None:
            expected = "pictures, or a checkpoint in loss.checkpoint"
            yield self.problem("source.uri", expected, "name one of the two", "neither")
        if self.source.uri is None:
            judges = {"clip.model": self.clip.model, "features.model": self.features.model}
            for path, value in {**judges, "reference.uri": self.reference.uri}.items():
                if value is not None:
                    yield self.problem(path, "null while source.uri is null", "name the pictures in source.uri")
            return
        if self.clip.model is None and self.features.model is None:
            expected = "null while clip.model and features.model are null"
            yield self.problem("source.uri", expected, "set a network to measure the pictures with")
        if (self.reference.uri is None) != (self.features.model is None):
            present, missing = "features.model", "reference.uri"
            if self.features.model is None:
                present, missing = missing, present
            yield self.problem(missing, f"a value while {present} is set", "FID and KID need both; set both or neither")
