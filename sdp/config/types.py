"""The types of keys' values that several sections share."""

import re
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from sdp.config.phrases import Says
from sdp.config.uri import READABLE, WRITABLE, check_endpoint, check_uri
from sdp.hardware import GPUS

Uri = Annotated[str, AfterValidator(partial(check_uri, schemes=READABLE)), Says("a URI")]
"""An input: a local path, or file://, s3://, gs://, https:// or hf://."""

FolderUri = Annotated[str, AfterValidator(partial(check_uri, schemes=WRITABLE)), Says("a URI")]
"""An output folder: a local path, or file://, s3:// or gs://."""

LONGEST_S = 604_800
"""Seconds in a week, the longest deadline."""
Name = Annotated[str, Field(min_length=1)]
Endpoint = Annotated[Name, AfterValidator(check_endpoint), Says("an address such as https://host:port")]
"""The address of an S3-compatible store."""
HeaderText = Annotated[str, Field(min_length=1, pattern=r"^[ -~]+$"), Says("some text of printable ASCII characters")]
"""Text that may appear in an HTTP header."""


def _accelerator(name: str) -> str:
    short = re.sub("^NVIDIA_(?:TESLA_)?(.+)", lambda match: match[1].replace("_", "-"), name, flags=re.IGNORECASE)
    known = ["gpu", "cpu", *(accelerator for gpu in GPUS.values() for accelerator in gpu.accelerators)]
    by_case = {accelerator.casefold(): accelerator for accelerator in known}
    return by_case.get(short.casefold(), short if name.startswith("NVIDIA_") else name)


Accelerator = Annotated[Name, AfterValidator(_accelerator)]
"""A Ray accelerator type, or Ray's constant for it (NVIDIA_TESLA_A10G is A10G); known ones in any case."""
Positive = Annotated[int, Field(ge=1)]
Resolution = Annotated[int, Field(ge=8, multiple_of=8)]
"""Side of a square picture in pixels; the VAE divides it by 8."""

Labels = Annotated[dict[Name, Name], Says("{label: value, …}")]
"""A selector of Ray node labels: {label: value}; a value may also be !value, in(a,b) or !in(a,b)."""
