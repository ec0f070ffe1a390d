"""The configuration of `sdp process`: from an images dataset to a latents dataset."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from sdp.config.base import REQUIRED, Section, key
from sdp.config.phrases import Says
from sdp.config.shared import Filters, JobConfig, OutputConfig, SourceConfig, WorkersConfig
from sdp.config.types import Labels, Name, Positive, Resolution, Uri
from sdp.errors import Problem

BatchSize = Annotated[
    Positive | tuple[Positive, ...] | None,
    Says("a whole number of 1 or more, or a list of one for each resolution, or null"),
]

WeightedColumns = Annotated[dict[Name, Annotated[float, Field(ge=0)]], Field(min_length=1)]
CaptionColumns = Annotated[Name | WeightedColumns | None, Says("a column, or {column: weight, …}, or null")]


class JoinedTable(Section):
    """A Parquet table whose columns count as columns of the images."""

    uri: Uri = key(REQUIRED, shapes_output=True)
    """A file, folder or pattern."""
    by: Name = key("row", shapes_output=True)
    """The column that it shares with the images; row is their address."""
    missing: Literal["keep", "drop"] = key("keep", shapes_output=True)
    """Whether to keep rows without an entry."""


class CaptionedSource(SourceConfig):
    """Images, with captions and scores of their own or from tables."""

    caption_column: CaptionColumns = key(None, shapes_output=True)
    """The column that holds the captions, or the JSON field in tars; null means prompt for pictures of sdp generate,
    else caption. If it has several columns, as {caption: 1, synthetic: 3}, each row draws one that is not empty, by
    weight; a column of weight 0 is used only if all others are empty."""
    caption: Name | None = key(None, shapes_output=True)
    """One caption for all pictures, in place of their own."""
    tables: tuple[JoinedTable, ...] = key((), shapes_output=True)
    """Parquet tables of captions or scores, each {uri, by, missing}, joined to the images by the column `by`: row, the
    image's address; file, the name of an image file below the folder; or a text column of the images, such as url.
    Their columns take the place of the images' own; a row without an entry keeps its own, or with missing: drop is
    filtered."""


class ProcessSource(CaptionedSource):
    uri: Uri = key(REQUIRED, shapes_output=True, example="s3://bucket/images")
    """A dataset of sdp download or sdp generate, Parquet with image bytes, WebDataset tars, or a folder of image files
    with captions beside them (a.jpg, a.txt)."""
    image_column: Name = key("image", shapes_output=True)
    """The column that holds the encoded images."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        columns = self.caption_column
        if self.image_column in (columns if isinstance(columns, dict) else (columns,)):
            yield self.problem("caption_column", "another column than image_column", "name it", repr(self.image_column))


class ProcessOutput(OutputConfig):
    rows_per_file: Positive | None = key(None, shapes_output=True)
    """Source rows per part file; null makes files of about 256 MB."""


class ModelConfig(Section):
    """The pretrained model whose VAE, text encoder and tokenizer are used."""

    source: Name = key(REQUIRED, shapes_output=True, example="builtin:tiny")
    """The model: builtin:tiny, a local or s3:// folder in diffusers layout, or a hub id with its revision."""


class TransformWorkersConfig(Section):
    """Transforms of any kind, on CPU."""

    node_labels: Labels = key({})
    """Ray node labels for transforms, such as {ray.io/node-group: cpu}; {} allows any node."""


class TransformConfig(TransformWorkersConfig):
    """Decoding, resizing and cropping, on CPU."""

    crop: Literal["center", "random", "buckets"] = key("center", shapes_output=True)
    """The part of an image to use: its middle square (center), a square chosen by the row's address (random), or nearly
    all of it, in the nearest of nine shapes of about the square's area (buckets)."""


def usual_batch(side: int) -> int:
    """Return the default batch size of an encoder: 64 up to 256 px, a quarter at twice the side."""
    return max(1, min(64, 64 * 256**2 // side**2))


class EncoderConfig(WorkersConfig):
    """The encoders of any job."""

    dtype: Literal["bf16", "fp16", "fp32"] = key("bf16", shapes_output=True)
    """Precision of the encoders; latents are always stored as fp16."""


class CompiledEncoderConfig(EncoderConfig):
    compile: bool = key(False)
    """Compile the encoders with torch.compile: slower to start, faster batches on a GPU."""


class EncodeConfig(CompiledEncoderConfig):
    """The encoders: the VAE and the text encoder."""

    batch_size: BatchSize = key(None, example=64)
    """Images per encoder batch, or a list with a number for each resolution; null means 64 at 256 px and a quarter at
    twice the side. Halved automatically where memory is short."""
    latents: Literal["sample", "moments"] = key("sample", shapes_output=True)
    """Store one draw from the VAE's distribution, fixed by the row's address (sample), or its mean and log-variance,
    from which training draws (moments; twice the bytes)."""
    text: Literal["token_ids", "text_embedding"] = key("token_ids", shapes_output=True)
    """How captions are stored: token_ids (154 bytes; training encodes them) or text_embedding (158 kB with SD2)."""

    def batch_sizes(self, resolutions: Sequence[int]) -> dict[int, int]:
        """Return the batch size of each resolution."""
        sizes = self.batch_size
        if sizes is None:
            return {side: usual_batch(side) for side in resolutions}
        groups = (sizes,) * len(resolutions) if isinstance(sizes, int) else sizes
        return dict(zip(resolutions, groups, strict=True))


class ProcessConfig(JobConfig):
    """Encode the images and captions of a dataset to latents and tokens."""

    source: ProcessSource = key(REQUIRED)
    """The images to encode."""
    output: ProcessOutput = key(REQUIRED)
    """The latents dataset to write."""
    resolutions: tuple[Resolution, ...] = key((256,), shapes_output=True)
    """Sides in pixels of the square crops to encode; an image is decoded once for all."""
    model: ModelConfig = key(REQUIRED)
    """The model that encodes."""
    seed: int = key(0, shapes_output=True, ge=0)
    """Random seed; with a row's address it decides that row's bits."""
    filters: Filters = key({}, shapes_output=True)
    """Bounds on columns of numbers, of the images or of source.tables: rows outside are filtered, and so are rows
    without a number, unless keep_unknown is true."""
    transform: TransformConfig = key(TransformConfig)
    """Decoding, resizing and cropping."""
    encode: EncodeConfig = key(EncodeConfig)
    """The encoders."""

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if not self.resolutions:
            yield self.problem("resolutions", "one or more", "list the sides of the crops to encode", "none")
        if repeated := sorted({side for side in self.resolutions if self.resolutions.count(side) > 1}):
            got = f"{repeated[0]} more than once"
            yield self.problem("resolutions", "each resolution once", "remove the repetition", got)
        uneven = [side for side in self.resolutions if side % 64]
        if self.transform.crop == "buckets" and uneven:
            expected = "multiples of 64 with transform.crop buckets"
            yield self.problem("resolutions", expected, "change one", str(uneven[0]))
        sizes = self.encode.batch_size
        if isinstance(sizes, tuple) and len(sizes) != len(self.resolutions):
            expected = f"one for each of {len(self.resolutions)} resolutions"
            hint = "list as many, or set a single number"
            yield self.problem("encode.batch_size", expected, hint, str(len(sizes)))
