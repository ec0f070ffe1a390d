"""The rows of the source that are fetched, and the outcomes of the others."""

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from sdp.config.download import DownloadSource, FiltersConfig
from sdp.datasets.columns import LARGEST_CELL, kind_of
from sdp.datasets.outcomes import FAILED, FILTERED, Outcome
from sdp.datasets.repeated import Repeated
from sdp.datasets.scores import scores_of
from sdp.datasets.units import Addresses
from sdp.download.blocklists import Blocklists
from sdp.urls import BadUrl, Url, key64, parse

_MARKS = 30
"""Combining marks that a character keeps (Unicode's stream-safe limit): sorting n of them takes n² steps."""
_KEPT = frozenset("\u200c\u200d")
"""Invisible characters with a meaning: the joiners of scripts and emoji."""


@dataclass(frozen=True)
class Rules:
    """The rules that decide about a row before it is fetched; picklable."""

    source: DownloadSource
    filters: FiltersConfig
    blocklists: Blocklists = field(default_factory=Blocklists)
    taken_down: Blocklists = field(default_factory=Blocklists)
    """URLs and hashes of takedowns."""
    taken_down_rows: BitMap64 = field(default_factory=BitMap64)
    repeated_urls: Repeated | None = None
    """Rows whose URL a lower one has."""

    def columns(self) -> list[str]:
        """Return the columns of the source that are read, each once."""
        source = self.source
        columns = [source.url_column, source.caption_column, *self.filters.columns, *source.columns]
        return list(dict.fromkeys(columns))

    def block_reason(self, url: Url) -> str | None:
        """Return the reason not to request a URL; None if it may be requested."""
        if self.blocklists.has_host(url.host):
            return "blocked_domain"
        if len(self.blocklists.urls) or len(self.taken_down.urls):
            key = key64(url.text)
            if self.taken_down.has_url(key):
                return "tombstone"
            if self.blocklists.has_url(key):
                return "blocked_url"
        return None


@dataclass(frozen=True, slots=True)
class RowToFetch:
    """A row to fetch."""

    row: int
    at: int
    """Position in the table."""
    url: Url
    caption: str
    note: str | None = None
    """The detail of the outcome if the row is written."""


def plan(table: pa.Table, rows: Addresses, rules: Rules) -> tuple[list[RowToFetch], list[Outcome]]:
    """Return which of these addresses to fetch, and the outcomes of the others."""
    filtered, too_long = _filtered(table, rules.filters), _too_long(table, rules.source.columns)
    urls = _cells(table, rules.source.url_column)
    captions = _cells(table, rules.source.caption_column)
    long_captions = _too_long(table, [rules.source.caption_column])
    repeats = np.zeros(len(rows), np.bool_) if rules.repeated_urls is None else rules.repeated_urls.mask(rows)

    def decide(at: int, row: int) -> RowToFetch | Outcome:
        if row in rules.taken_down_rows:
            return Outcome(row, FILTERED, "tombstone", attempts=0)
        if filtered[at] is not None:
            return Outcome(row, FILTERED, filtered[at], attempts=0)
        if at in too_long:
            return Outcome(row, FAILED, "bad_row", too_long[at], attempts=0)
        try:
            url = parse(urls[at])
        except BadUrl as error:
            return Outcome(row, FAILED, "bad_url", str(error), attempts=0)
        if (caption := normalised(captions[at])) is None:
            return Outcome(row, FAILED, "no_caption", attempts=0)
        if (reason := rules.block_reason(url)) is not None:
            return Outcome(row, FILTERED, reason, attempts=0)
        if repeats[at]:
            return Outcome(row, FILTERED, "duplicate_url", attempts=0)
        return RowToFetch(row, at, url, caption, f"{long_captions[at]}, cut" if at in long_captions else None)

    decided = [decide(at, row) for at, row in enumerate(rows.tolist())]
    to_fetch = [row for row in decided if isinstance(row, RowToFetch)]
    return to_fetch, [row for row in decided if isinstance(row, Outcome)]


def _filtered(table: pa.Table, filters: FiltersConfig) -> list[str | None]:
    """Return for each row the first filter that leaves it out."""
    reasons: list[str | None] = [None] * table.num_rows
    for score in scores_of(filters.columns):
        for at in np.flatnonzero(score.mask(table)).tolist():
            reasons[at] = reasons[at] or score.reason
    return reasons


def _too_long(table: pa.Table, columns: Sequence[str]) -> dict[int, str]:
    """Return the positions of rows with a cell of these columns that was cut, and what was wrong with it."""
    return {
        at: f"column {name}: more than {LARGEST_CELL:,} bytes"
        for name in columns
        if kind_of(table[name].type) in ("text", "bytes")
        for at in np.flatnonzero(pc.fill_null(pc.greater(pc.binary_length(table[name]), LARGEST_CELL), False)).tolist()
    }


def _cells(table: pa.Table, column: str) -> Sequence[object]:
    """Return a column's cells as text, even where the source has bytes; invalid UTF-8 stays bytes."""
    values = table[column]
    if pa.types.is_binary(values.type):
        return [as_text(cell) for cell in values.to_pylist()]
    try:
        cells: list[object] = values.to_pylist()
    except UnicodeDecodeError:
        cells = [as_text(cell) for cell in values.cast(pa.binary()).to_pylist()]
    return cells


def as_text(cell: object) -> object:
    """Return valid UTF-8 as text, and anything else unchanged."""
    try:
        return cell.decode() if isinstance(cell, bytes) else cell
    except UnicodeDecodeError:
        return cell


def normalised(caption: object) -> str | None:
    """Return a caption as one line of valid, composed (NFC) text; None if nothing is left.

    A caption longer than LARGEST_CELL is cut. Bytes are decoded as UTF-8 with U+FFFD for invalid ones. Surplus
    marks are removed, and control characters and runs of blanks become one blank.
    """
    if not isinstance(caption, str | bytes):
        return None
    whole, caption = len(caption) <= LARGEST_CELL, caption[:LARGEST_CELL]
    if isinstance(caption, bytes):
        caption, _ = codecs.utf_8_decode(caption, "replace", whole)  # else without a character that the cut divides
    if caption.isascii() and caption.isprintable():
        return " ".join(caption.split()) or None
    text = caption.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = unicodedata.normalize("NFC", "".join(_harmless(text)))
    text = " ".join(text.split())
    return text if any(letter != "\ufffd" and letter not in _KEPT for letter in text) else None


def _harmless(text: str) -> Iterator[str]:
    """Yield the characters of a text without surplus marks, and with blanks for control characters."""
    marks = 0
    for letter in text:
        category = unicodedata.category(letter)
        marks = marks + 1 if category[0] == "M" else 0
        if marks <= _MARKS:
            # Cc: control, Cs: lone surrogate, Cf: format marks such as a byte-order mark.
            yield " " if category in ("Cc", "Cs", "Cf") and letter not in _KEPT else letter
