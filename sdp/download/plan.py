"""Which rows of a piece of the source are fetched, and what becomes of the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from sdp.config.download import DownloadSource, FiltersConfig
from sdp.datasets.outcomes import FAILED, FILTERED, Outcome
from sdp.datasets.units import Rows
from sdp.download import filters as source_filters
from sdp.download.blocklists import Blocklists
from sdp.download.captions import normalised
from sdp.urls import BadUrl, Url, key64, parse


@dataclass(frozen=True)
class Rules:
    """What decides over a row before it is fetched; picklable."""

    source: DownloadSource
    filters: FiltersConfig
    blocklists: Blocklists = field(default_factory=Blocklists)
    taken_down: Blocklists = field(default_factory=Blocklists)
    """URLs and hashes of takedown lists."""
    taken_down_rows: BitMap64 = field(default_factory=BitMap64)

    def columns(self) -> list[str]:
        """The columns of the source that are read, each once."""
        source = self.source
        wanted = [source.url_column, source.caption_column, *source_filters.columns(self.filters), *source.columns]
        return list(dict.fromkeys(wanted))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row to fetch."""

    row: int
    at: int
    """Its place in the table."""
    url: Url
    caption: str


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A piece of the source, split."""

    wanted: list[Wanted]
    refused: list[Outcome]


def plan(table: pa.Table, rows: Rows, rules: Rules, duplicates: BitMap64 | None = None) -> RowPlan:
    """Split the rows with these addresses; `duplicates` are addresses whose URL a lower one has."""
    refused: list[Outcome] = []
    wanted: list[Wanted] = []
    left_out = _filtered(table, rules.filters)
    urls = _cells(table, rules.source.url_column)
    captions = _cells(table, rules.source.caption_column)
    for at, row in enumerate(rows.tolist()):
        if row in rules.taken_down_rows:
            refused.append(Outcome(row, FILTERED, "tombstone", attempts=0))
            continue
        if left_out[at] is not None:
            refused.append(Outcome(row, FILTERED, left_out[at], attempts=0))
            continue
        try:
            url = parse(urls[at])
        except BadUrl as error:
            refused.append(Outcome(row, FAILED, "bad_url", str(error), attempts=0))
            continue
        caption = normalised(captions[at])
        if caption is None:
            refused.append(Outcome(row, FAILED, "no_caption", attempts=0))
        elif (reason := _blocked(url, rules)) is not None:
            refused.append(Outcome(row, FILTERED, reason, attempts=0))
        elif duplicates is not None and row in duplicates:
            refused.append(Outcome(row, FILTERED, "duplicate_url", attempts=0))
        else:
            wanted.append(Wanted(row, at, url, caption))
    return RowPlan(wanted, refused)


def _filtered(table: pa.Table, filters: FiltersConfig) -> list[str | None]:
    """For each row the first filter that leaves it out."""
    reasons: list[str | None] = [None] * table.num_rows
    for reason, mask in source_filters.masks(table, filters):
        for at in np.flatnonzero(mask).tolist():
            reasons[at] = reasons[at] or reason
    return reasons


def _blocked(url: Url, rules: Rules) -> str | None:
    if rules.blocklists.has_host(url.host):
        return "blocked_domain"
    if len(rules.blocklists.urls) or len(rules.taken_down.urls):
        key = key64(url.text)
        if rules.taken_down.has_url(key):
            return "tombstone"
        if rules.blocklists.has_url(key):
            return "blocked_url"
    return None


def _cells(table: pa.Table, column: str) -> Sequence[object]:
    """A column's cells: text, also where the source calls it bytes; what is no UTF-8 as the bytes that it is."""
    values = table[column]
    if pa.types.is_binary(values.type):
        return [as_text(cell) for cell in values.to_pylist()]
    try:
        cells: list[object] = values.to_pylist()
    except UnicodeDecodeError:
        cells = [as_text(cell) for cell in values.cast(pa.binary()).to_pylist()]
    return cells


def as_text(cell: object) -> object:
    """Bytes that are UTF-8 as text; anything else as it is."""
    try:
        return cell.decode() if isinstance(cell, bytes) else cell
    except UnicodeDecodeError:
        return cell
