"""What `sdp evaluate` is told: how good pictures are, and how well a checkpoint predicts what it has not seen."""

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

_PICTURES = "a dataset of sdp generate or sdp download, Parquet files, or a folder of picture files"


class PictureSource(Section):
    """Where pictures are read from."""

    uri: Uri | None = key(
        None, f"The pictures to judge: {_PICTURES}; null judges none.", shapes_output=True, example="s3://bucket/images"
    )
    image_column: Name = key("image", "The column that holds the encoded pictures.", shapes_output=True)
    caption_column: Name | None = key(
        None,
        "The column that holds the captions; null takes prompt of pictures that were drawn, else caption.",
        shapes_output=True,
    )


class ReferenceSource(PictureSource):
    uri: Uri | None = key(
        None,
        f"The pictures to compare with: {_PICTURES}, or OUTPUT/reference of another evaluation, which is not made "
        "again; null compares with none.",
        shapes_output=True,
        example="s3://bucket/images",
    )
    limit: Positive | None = key(None, "How many of them to take, from the first; null takes them all.")


class EvaluateOutput(OutputConfig):
    rows_per_file: Positive = key(
        1024, "Pictures of one part file: what one evaluator looks at in one go.", shapes_output=True
    )


class ClipConfig(Section):
    """The CLIP score: how well pictures go with their captions."""

    model: Name | None = key(
        None,
        "A CLIP model as transformers saves it: a local or s3:// folder, or a hub id with its revision; null scores "
        "none.",
        shapes_output=True,
    )


class FeaturesConfig(Section):
    """The network whose features are compared for FID, FID-infinity and KID."""

    model: Name | None = key(
        None,
        "A folder (local, s3:// or on the hub) with FID's Inception weights (pt_inception-2015-12-05-6726825d.pth), "
        "or with CLIP, DINO or DINOv2 as transformers saves them; null compares nothing.",
        shapes_output=True,
    )
    resize: Literal["clean", "tensorflow"] = key(
        "clean",
        "How pictures reach Inception's 299 pixels: antialiased (as clean-fid does) or as the first FID did.",
        shapes_output=True,
    )


class FidConfig(Section):
    """The Fréchet distance of the features of both sets."""

    infinity_points: int = key(
        15, "Set sizes from which FID is extrapolated to a set without end (FID-infinity); 0 leaves it out.", ge=0
    )


class KidConfig(Section):
    """The kernel distance of the features: its expectation does not depend on how many pictures there are."""

    subsets: int = key(100, "Subsets that are compared; 0 leaves KID out.", ge=0)
    subset_size: int = key(1000, "Pictures of each subset; fewer where there are fewer.", ge=2)


class LossConfig(Section):
    """The denoising loss of a checkpoint, by timestep, on latents that it was not trained on."""

    checkpoint: Name | None = key(
        None, "A checkpoint of sdp train, or a run for its newest one; null measures no loss."
    )
    weights: Literal["auto", "ema", "raw"] = key(
        "auto", "The moving average (ema), the weights as trained (raw), or the average if there is one."
    )
    model: Name | None = key(None, "Where the model that it was trained from is now; null looks where training did.")
    source: Uri | None = key(
        None,
        "A latents dataset, of which all rows are taken; null takes what the training has held out of its own "
        "(data.holdout).",
    )
    resolution: Resolution | None = key(None, "Side of the pictures whose latents are taken; null takes training's.")
    rows: Positive = key(1024, "How many rows to take.")
    buckets: Positive = key(10, "Ranges of timesteps, in each of which every row is noised once.", le=1000)
    batch_size: Positive = key(32, "Rows at once.")


class EvaluatorsConfig(WorkersConfig):
    """The evaluators and where they are."""

    batch_size: Positive = key(64, "Pictures that an evaluator looks at at once; halved where memory is short.")
    threads: Positive = key(4, "Threads in which an evaluator decodes and resizes pictures.")


class EvaluateConfig(JobConfig):
    """Judge pictures (CLIP score, FID, KID), and the loss of a checkpoint on what it has not seen."""

    source: PictureSource = key(PictureSource, "The pictures to judge.")
    reference: ReferenceSource = key(ReferenceSource, "The pictures to compare with.")
    output: EvaluateOutput = key(REQUIRED, "The evaluation: features of the pictures, and evaluation.json.")
    clip: ClipConfig = key(ClipConfig, "The CLIP score.")
    features: FeaturesConfig = key(FeaturesConfig, "What FID and KID compare.")
    fid: FidConfig = key(FidConfig, "The Fréchet distance.")
    kid: KidConfig = key(KidConfig, "The kernel distance.")
    loss: LossConfig = key(LossConfig, "The denoising loss on held-out latents.")
    seed: int = key(0, "Seed of the subsets that KID and FID-infinity draw.", ge=0)
    scaling: EvaluatorsConfig = key(EvaluatorsConfig, "The evaluators and where they are.")

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.source.uri is None and self.loss.checkpoint is None:
            yield Problem(
                "source.uri", "pictures, or a checkpoint in loss.checkpoint", "neither", "name one of the two"
            )
        if self.source.uri is None:
            for path, value in (
                ("clip.model", self.clip.model),
                ("features.model", self.features.model),
                ("reference.uri", self.reference.uri),
            ):
                if value is not None:
                    yield Problem(path, "null while source.uri is null", repr(value), "name the pictures in source.uri")
            return
        if self.clip.model is None and self.features.model is None:
            yield Problem(
                "source.uri",
                "null while clip.model and features.model are null",
                repr(self.source.uri),
                "name a network that is to look at the pictures",
            )
        if (self.reference.uri is None) != (self.features.model is None):
            there, lacking = ("features.model", "reference.uri")
            if self.features.model is None:
                there, lacking = lacking, there
            yield Problem(lacking, f"a value while {there} is set", "null", "FID and KID need both, or set neither")
