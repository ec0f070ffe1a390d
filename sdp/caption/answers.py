"""Questions on pictures, and whatever answers them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sdp.imaging import Pixels, RowError


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt on a picture."""

    row: int
    pixels: Pixels
    prompt: str


ModelAnswer = str | RowError
"""A model's words, or why there are none."""


class Captioner(Protocol):
    """A model, or a server that has one."""

    def __call__(self, questions: Sequence[Question]) -> Iterator[ModelAnswer]:
        """Yield the answers in the order of the questions; called from several threads."""
