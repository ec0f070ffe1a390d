"""A model's answer as a caption: what is cut off, and what is no caption."""

import re
import unicodedata
from collections.abc import Sequence

from sdp.imaging import RowError

LONGEST = 8192
"""Characters kept of a caption, which no tokenizer of a text encoder reads to its end."""
_THOUGHT = "</think>"
_REFUSALS = re.compile(
    r"(i['’]?m sorry|i am sorry|sorry,|i can(['’]t|not| not)|i(['’]?m| am) (unable|not able)|as an ai\b|i won['’]t)",
    re.I,
)
_LONGEST_PERIOD = 12
_MOST_REPEATS = 3
"""Times that the same words may follow each other."""


def caption_of(answer: str, trim: Sequence[str]) -> str:
    """Return the caption in an answer; raise RowError if it holds none. Takes time in proportion to its length."""
    text = tidy(answer.rpartition(_THOUGHT)[2])
    for beginning in trim:
        if text[: len(beginning)].casefold() == beginning.casefold():
            text = text[len(beginning) :].lstrip(" ,:;-")
            text = text[:1].upper() + text[1:]
    text = text.strip('"“”').strip()
    if not text:
        raise RowError("empty_answer", repr(answer[:80]))
    if _REFUSALS.match(text):
        raise RowError("refused", text)
    if repeated := loop_in(text.casefold().split()):
        raise RowError("repetitive", repeated)
    return text[:LONGEST]


def tidy(text: str) -> str:
    """Return text on one line, without characters that control a terminal or the direction of writing."""
    kept = (" " if c.isspace() or unicodedata.category(c) == "Cc" else c for c in unicodedata.normalize("NFC", text))
    return " ".join("".join(c for c in kept if unicodedata.category(c) not in ("Cf", "Cs", "Co", "Cn")).split())


def loop_in(words: Sequence[str]) -> str:
    """Return words that follow themselves too often, or nothing."""
    for period in range(1, _LONGEST_PERIOD + 1):
        run = 0
        for at in range(period, len(words)):
            run = run + 1 if words[at] == words[at - period] else 0
            if run >= period * _MOST_REPEATS:
                return " ".join(words[at - period + 1 : at + 1])
    return ""
