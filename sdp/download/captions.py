"""Captions as they stand in crawled tables: made valid, or found missing."""

import re
import unicodedata

_KEPT = frozenset("\u200c\u200d")
"""Invisible characters that carry meaning: joiners of scripts and of emoji."""
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, moves
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # titles, links
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
"""What tells a terminal to colour, move or name something: of these not only the first character is no text."""


def normalised(caption: object) -> str | None:
    """One line of valid, composed (NFC) text; None where there is none.

    Bytes are read as UTF-8, what is invalid becomes U+FFFD, a terminal's escape sequences go, and other control
    characters and runs of blanks become a blank.
    """
    if isinstance(caption, bytes):
        caption = caption.decode("utf-8", "replace")
    if not isinstance(caption, str):
        return None
    if caption.isascii() and caption.isprintable():
        return " ".join(caption.split()) or None
    text = caption.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = unicodedata.normalize("NFC", _ESCAPES.sub("", text))
    text = "".join(" " if _is_control(letter) else letter for letter in text)
    text = " ".join(text.split())
    return text if any(letter != "\ufffd" and letter not in _KEPT for letter in text) else None


def _is_control(letter: str) -> bool:
    # Cc: control, Cs: lone surrogate, Cf: format marks such as a byte-order mark.
    return unicodedata.category(letter) in ("Cc", "Cs", "Cf") and letter not in _KEPT
