"""The configuration of `sdp caption`: from pictures to a dataset of captions."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from sdp.config.base import REQUIRED, Section, key
from sdp.config.phrases import Says
from sdp.config.process import EncoderConfig, ProcessSource, TransformWorkersConfig
from sdp.config.shared import JobConfig, OutputConfig
from sdp.config.types import Endpoint, Name, Positive
from sdp.errors import Problem

RESERVED = ("row", "key")
"""Columns of a captions dataset that no prompt may have."""

PromptColumns = Annotated[
    dict[Name, Name | Annotated[dict[Name, Annotated[float, Field(gt=0)]], Field(min_length=1)]],
    Field(min_length=1),
    Says("{column: prompt, …}, where a prompt may be {prompt: weight, …}"),
]


class CaptionOutput(OutputConfig):
    rows_per_file: Positive = key(4096, shapes_output=True)
    """Source rows per part file."""


class CaptionsConfig(Section):
    """Prompts, and the model or the server that answers them."""

    model: Name = key(REQUIRED, shapes_output=True, example="s3://bucket/SmolVLM2-2.2B-Instruct")
    """A model that reads pictures and writes text, as transformers saves it: a local or s3:// folder, or a hub id with
    its revision. With url, the model's name at that server."""
    url: Endpoint | None = key(None, example="http://vlm:8000/v1")
    """A server of OpenAI's chat API (vLLM, SGLang, llama.cpp, a hosted one), whose key is in OPENAI_API_KEY if it wants
    one; null runs the model in the workers."""
    prompts: PromptColumns = key({"vlm": "Describe this image in one sentence."}, shapes_output=True)
    """What to ask, by the column that gets the answers. If a column has several prompts, as {"…": 1, "…": 3}, each row
    draws one by weight. {caption} stands for the picture's own caption."""
    max_tokens: Positive = key(128)
    """The longest answer; one that is cut there fails, and can be tried again with more."""
    temperature: float = key(0.0, ge=0, le=2)
    """How much answers vary: 0 always takes the likeliest token."""
    side: Annotated[int, Field(ge=32, le=4096)] = key(768, shapes_output=True)
    """Pictures are made smaller until no side is longer than this many pixels."""
    trim: tuple[Name, ...] = key(
        ("The image shows", "The image depicts", "The image features", "This image shows", "In this image,"),
        shapes_output=True,
    )
    """Beginnings that are cut off answers."""

    def contradictions(self) -> Iterable[Problem]:
        if reserved := sorted({*self.prompts} & {*RESERVED}):
            yield self.problem("prompts", "other columns than row and key", "choose another name", reserved[0])


class CaptionWorkersConfig(EncoderConfig):
    """The workers, which run the model or ask the server."""

    batch_size: Positive = key(16)
    """Pictures that the model gets at once, halved automatically where memory is short; with captions.url, requests
    under way at once."""


class CaptionConfig(JobConfig):
    """Write captions of pictures by a vision-language model."""

    source: ProcessSource = key(REQUIRED)
    """The pictures to caption."""
    output: CaptionOutput = key(REQUIRED)
    """The dataset of captions to write."""
    captions: CaptionsConfig = key(CaptionsConfig)
    """Prompts, and the model or the server that answers them."""
    seed: int = key(0, shapes_output=True, ge=0)
    """Random seed; with a row's address it draws one of several prompts."""
    transform: TransformWorkersConfig = key(TransformWorkersConfig)
    """Decoding and resizing."""
    encode: CaptionWorkersConfig = key(CaptionWorkersConfig)
    """The workers."""
