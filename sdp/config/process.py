"""What `sdp process` is told: from an images dataset to a latents dataset."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from sdp.config.base import (
    REQUIRED,
    JobConfig,
    Labels,
    Name,
    OutputConfig,
    Positive,
    Resolution,
    Says,
    Section,
    SourceConfig,
    Uri,
    WorkersConfig,
    key,
)
from sdp.errors import Problem

BatchSize = Annotated[
    Positive | tuple[Positive, ...] | None,
    Says("a whole number of 1 or more, or a list of one for each resolution, or null"),
]


class ProcessSource(SourceConfig):
    uri: Uri = key(
        REQUIRED,
        "A dataset of sdp download or sdp generate, Parquet with image bytes, tars as WebDataset writes them, or a "
        "folder of picture files with their captions beside them (a.jpg, a.txt).",
        shapes_output=True,
        example="s3://bucket/images",
    )
    image_column: Name = key("image", "The column that holds the encoded images.", shapes_output=True)
    caption_column: Name | None = key(
        None,
        "The column that holds the captions, of tars the field of the JSON; null takes prompt of pictures that were "
        "drawn, else caption.",
        shapes_output=True,
    )
    caption: Name | None = key(
        None, "One caption for all pictures, whatever they bring themselves.", shapes_output=True
    )

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.caption_column == self.image_column:
            yield Problem("caption_column", "another column than image_column", repr(self.caption_column), "name it")


class ProcessOutput(OutputConfig):
    rows_per_file: Positive | None = key(
        None, "Source rows that one part file accounts for; null goes by target_bytes.", shapes_output=True
    )
    target_bytes: Positive = key(256_000_000, "About how large a part file becomes.", shapes_output=True)


class ModelConfig(Section):
    """The pretrained model whose VAE, text encoder and tokenizer are used."""

    source: Name = key(
        REQUIRED,
        "Where the model is: builtin:tiny, a local or s3:// folder in diffusers layout, or a hub id with its revision.",
        shapes_output=True,
        example="builtin:tiny",
    )


class TransformConfig(Section):
    """Decoding, resizing and cropping, on CPU."""

    crop: Literal["center", "random", "buckets"] = key(
        "center",
        "What to take of an image: the square in its middle, one at random (which depends on the row's address alone), "
        "or nearly all of it, in the nearest of nine shapes of about the square's area.",
        shapes_output=True,
    )
    max_upscale: float = key(
        2.0, "Images that would have to be enlarged more than this fail as too small.", shapes_output=True, ge=1
    )
    oversample: float = key(
        1.0,
        "JPEGs are decoded to at least this many times the size needed: more is nearer to Lanczos, and slower.",
        shapes_output=True,
        ge=1,
    )
    max_pixels: Positive = key(100_000_000, "Images of more pixels fail.", shapes_output=True)
    concurrency: Positive | None = key(
        None, "The most transforms at once over the whole cluster; null takes what keeps the encoders busy."
    )
    node_labels: Labels = key(
        {}, "Ray node labels that transforms are placed by, such as {ray.io/node-group: cpu}; {} takes any node."
    )


class EncoderConfig(WorkersConfig):
    """The encoders, whatever they are for."""

    gpus_per_worker: float = key(1.0, "GPUs that one encoder reserves; a fraction shares a GPU.", gt=0)
    dtype: Literal["bf16", "fp16", "fp32"] = key(
        "bf16", "What the encoders compute in; latents are stored as fp16 whatever this is.", shapes_output=True
    )
    compile: bool = key(False, "Compile the encoders with torch.compile: a slower start, faster batches on GPU.")
    channels_last: bool = key(True, "Keep images channels-last in memory: faster convolutions.")

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if self.gpus_per_worker > 1 and self.gpus_per_worker != int(self.gpus_per_worker):
            yield Problem("gpus_per_worker", "a whole number above 1", f"{self.gpus_per_worker:g}", "round it")


class EncodeConfig(EncoderConfig):
    """The encoders: the VAE and the text encoder."""

    batch_size: BatchSize = key(
        None,
        "Images that an encoder takes at once, or a list of one number for each resolution; null takes 64 at 256 px, a "
        "quarter at twice the side. Halved by itself where memory is short.",
        example=64,
    )
    latents: Literal["sample", "moments"] = key(
        "sample",
        "Store a sample of the VAE's distribution, drawn by the row's address, or its mean and log-variance to sample "
        "from in training (twice the bytes).",
        shapes_output=True,
    )
    text: Literal["token_ids", "text_embedding"] = key(
        "token_ids",
        "Store captions as token ids (154 bytes; encoded in training) or as embeddings (158 kB with SD2).",
        shapes_output=True,
    )

    def batch_sizes(self, resolutions: Sequence[int]) -> dict[int, int]:
        """The batch size of each resolution."""
        given = self.batch_size
        if given is None:
            return {side: max(1, min(64, 64 * 256**2 // side**2)) for side in resolutions}
        each = (given,) * len(resolutions) if isinstance(given, int) else given
        return dict(zip(resolutions, each, strict=True))


class ProcessConfig(JobConfig):
    """Encode the images and captions of a dataset to latents and tokens."""

    source: ProcessSource = key(REQUIRED, "The images to encode.")
    output: ProcessOutput = key(REQUIRED, "The latents dataset to write.")
    resolutions: tuple[Resolution, ...] = key(
        (256,), "Sides of the square pictures to encode, all from one decode.", shapes_output=True
    )
    model: ModelConfig = key(REQUIRED, "The model that encodes.")
    seed: int = key(
        0, "Seed of everything random; with a row's address it decides that row's bits.", shapes_output=True, ge=0
    )
    transform: TransformConfig = key(TransformConfig, "Decoding, resizing and cropping.")
    encode: EncodeConfig = key(EncodeConfig, "The encoders.")

    def contradictions(self) -> Iterable[Problem]:
        yield from super().contradictions()
        if not self.resolutions:
            yield Problem("resolutions", "one or more", "none", "name the sides of the pictures to encode")
        twice = sorted({side for side in self.resolutions if self.resolutions.count(side) > 1})
        if twice:
            yield Problem("resolutions", "each resolution once", f"{twice[0]} more than once", "remove the repetition")
        uneven = [side for side in self.resolutions if side % 64]
        if self.transform.crop == "buckets" and uneven:
            yield Problem("resolutions", "multiples of 64 with transform.crop buckets", str(uneven[0]), "change one")
        sizes = self.encode.batch_size
        if isinstance(sizes, tuple) and len(sizes) != len(self.resolutions):
            yield Problem(
                "encode.batch_size",
                f"one for each of {len(self.resolutions)} resolutions",
                f"{len(sizes)}",
                "give as many, or a single number",
            )
