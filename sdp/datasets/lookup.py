"""Lookup of rows by their URL or by the hash of their content.

A part stores URLs as the source has them, so both sides are compared in the normal form of `sdp.urls`. Parsing is slow:
a regular expression over whole columns excludes other hosts first.
"""

from collections.abc import Iterable, Iterator, Mapping, Set

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.parts import read_rows
from sdp.datasets.units import PartKey, part_name
from sdp.storage import Storage
from sdp.urls import BadUrl, parse

Hit = tuple[str, str, int]
"""`url` or `sha256`, the value, and the address of a row that has it."""

_PLAIN_HOST = r"^https?://(?P<host>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?(?::[0-9]*)?(?:[/?#]|$)"
"""The host of a plain URL; every other URL is parsed."""


def in_parts(storage: Storage, parts: Iterable[PartKey], wanted: Mapping[str, Set[str]]) -> list[Hit]:
    """Find the written rows of some parts that have one of the wanted URLs, in normal form, or hashes."""
    by_part = ordered_map(lambda part: _in_part(storage, part_name(*part), wanted), parts, workers=8)
    return [hit for hits in by_part for hit in hits]


def positions(column: pa.ChunkedArray, urls: Set[str]) -> Iterator[tuple[int, str]]:
    """Yield the positions in a column of text whose cells hold one of these URLs, with the URL in normal form."""
    hosts = pa.array(sorted({parse(url).host for url in urls}), pa.large_string())
    text = column.cast(pa.large_string())
    host = pc.struct_field(pc.extract_regex(pc.ascii_lower(text), pattern=_PLAIN_HOST), "host")
    candidates = np.flatnonzero(pc.or_(pc.is_null(host), pc.is_in(host, hosts)).to_numpy())
    for at, cell in zip(candidates.tolist(), text.take(pa.array(candidates, pa.int64())).to_pylist(), strict=True):
        try:
            url = parse(cell).text
        except BadUrl:
            continue
        if url in urls:
            yield at, url


def _in_part(storage: Storage, path: str, wanted: Mapping[str, Set[str]]) -> list[Hit]:
    table = read_rows(storage, path, ["row", *(column for column, values in wanted.items() if values)])
    rows, hits = table["row"].to_numpy(), list[Hit]()
    for column in table.column_names[1:]:  # a part may lack the others
        find = positions if column == "url" else _equal
        hits += [(column, value, int(rows[at])) for at, value in find(table[column], wanted[column])]
    return hits


def _equal(column: pa.ChunkedArray, values: Set[str]) -> Iterator[tuple[int, str]]:
    """Yield the positions in a column whose cells are one of these values, with the value."""
    at = np.flatnonzero(pc.is_in(column, pa.array(sorted(values), pa.string())).to_numpy())
    yield from zip(at.tolist(), column.take(pa.array(at, pa.int64())).to_pylist(), strict=True)
