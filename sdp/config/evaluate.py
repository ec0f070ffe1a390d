"""The configuration of `sdp evaluate`: the quality of pictures."""

from collections.abc import Iterable

from sdp.config.base import REQUIRED, Section, key
from sdp.config.shared import JobConfig, OutputConfig, WorkersConfig
from sdp.config.types import Name, Uri
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

    uri: Uri = key(REQUIRED, example="s3://bucket/pictures")
    """The pictures: a dataset of sdp generate or sdp download, Parquet files, or a folder of picture files."""
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


class EvaluateConfig(JobConfig):
    """Measure the quality of pictures: CLIP score, FID, KID."""

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
    scaling: WorkersConfig = key(WorkersConfig)
    """The number and placement of the evaluators."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.clip.model is None and self.features.model is None:
            yield self.problem("clip.model", "a value while features.model is null", "set one of them, or both")
        if (self.reference.uri is None) != (self.features.model is None):
            present, missing = "features.model", "reference.uri"
            if self.features.model is None:
                present, missing = missing, present
            yield self.problem(missing, f"a value while {present} is set", "FID and KID need both; set both or neither")
