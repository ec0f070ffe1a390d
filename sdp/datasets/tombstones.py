"""Takedowns: images that every later stage and epoch leaves out, listed beside their dataset.

A takedown names an address, a URL or a content hash. Every dataset made from this one has the same addresses. URLs and
hashes are looked up in the parts of the images dataset, so that later stages need only a set of addresses.

    _tombstones/000000.pq         a list, written before any lookup so that no later reader misses it
    _tombstones/looked/000000.pq  a lookup: the rows that match the lists, and the parts that were searched

Loading also searches the parts that no lookup covers, such as those that a running download has just written. `settle`
stores the result of such a search, so that it is done once.
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, PlainSerializer, PlainValidator
from pyroaring import BitMap64

from sdp.datasets.columns import parquet_bytes, table_of
from sdp.datasets.lookup import in_parts
from sdp.datasets.manifest import read_manifest
from sdp.datasets.output import parts_in, read_head, read_output
from sdp.datasets.records import Whole, dump, reading
from sdp.datasets.records import parse as parse_record
from sdp.datasets.units import PartKey
from sdp.errors import AlreadyExists, DatasetError, NotFound, UserError
from sdp.storage import Storage, open_storage
from sdp.urls import BadUrl, parse

FOLDER = "_tombstones/"
KINDS = ("row", "url", "sha256")
SCHEMA = pa.schema([("kind", pa.string()), ("value", pa.string()), ("row", pa.int64())])
_LIST = re.compile(r"_tombstones/(\d{6})\.pq", re.ASCII)
_LOOKED = re.compile(r"_tombstones/looked/(\d{6})\.pq", re.ASCII)
_KEY = b"sdp.looked"
_NORMAL = r"^https?://[a-z0-9-]+(\.[a-z0-9-]+)*/([A-Za-z0-9_~-][A-Za-z0-9._~-]*/)*([A-Za-z0-9_~-][A-Za-z0-9._~-]*)?$"
"""Most URLs in normal form; parsing the others takes ten times as long."""


@dataclass(frozen=True, slots=True, order=True)
class Takedown:
    """One entry of a takedown list."""

    kind: str
    value: str
    """The address; the URL in its normal form; or the hash in lower case."""

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


@dataclass(frozen=True)
class Tombstones:
    """The takedowns of a dataset and of its ancestors. Lists may have millions of entries, so they stay in Arrow."""

    rows: BitMap64
    """Every address to leave out."""
    listed: pa.Table
    """The entries of all lists."""

    def values(self, kind: str) -> frozenset[str]:
        """Return the listed values of a kind."""
        return _values(self.listed, kind)

    def mask(self, rows: Sequence[int]) -> list[bool]:
        """Return for each address whether it has been taken down."""
        return [row in self.rows for row in rows]

    def lists_value(self, value: Takedown) -> bool:
        """Return whether a list has an entry, whatever it matches."""
        return bool(pc.any(pc.equal(_texts(self.listed), str(value))).as_py())

    def __len__(self) -> int:
        """Count the takedowns, each once however many rows it matches."""
        return int(pc.count_distinct(_texts(self.listed)).as_py())


@dataclass(frozen=True, slots=True)
class Added:
    """The result of adding a takedown list."""

    recorded: list[Takedown]
    """Entries that are new."""
    known: int
    """Number of entries that were recorded before."""
    rows: list[int]
    """The addresses in this dataset that they match."""
    unmatched: list[Takedown]
    """Entries that match nothing in this dataset yet. They apply to rows that are written later."""


# --- lists from users ------------------------------------------------------------------------------------------------


def parse_list(text: str, where: str, row_of: Callable[[str], int] | None = None) -> list[Takedown]:
    """Parse a list: `row 123`, `url https://…`, `sha256 ab12…` or `file a.jpg` a line; # after a blank is a comment.

    `row_of` returns the address of an image file.
    """
    takedowns = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entry = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
        if not entry:
            continue
        kind, *rest = entry.split(None, 1)
        if kind.lower() == "file" and rest and row_of is not None:  # a name in the source
            try:
                kind, rest = "row", [str(row_of(rest[0]))]
            except UserError as error:
                raise UserError(f"{where}:{number}: {error}") from error
        value = rest[0] if rest else ""
        if kind.lower() in (*KINDS, "file"):
            kind = kind.lower()
        takedowns.append(takedown(kind, value, f"{where}:{number}", "correct the line"))
    return takedowns


def takedown(kind: str, value: str, where: str, hint: str) -> Takedown:
    """Return a takedown in normal form; raise UserError for an invalid one."""
    value, cause = value.strip(), ""
    if kind == "row" and re.fullmatch(r"[0-9]{1,18}", value):
        return Takedown(kind, str(int(value)))
    if kind == "sha256" and re.fullmatch(r"[0-9a-fA-F]{64}", value):
        return Takedown(kind, value.lower())
    if kind == "url":
        try:
            return Takedown(kind, parse(value).text)
        except BadUrl as error:
            cause = f" ({error})"
    got = f"{kind} {value}".strip()[:80]
    forms = "`row NUMBER`, `url URL`, `sha256 HEX` or `file NAME`"
    raise UserError(f"{where}: expected {forms}, got {got!r}{cause}; {hint}")


# --- recording -------------------------------------------------------------------------------------------------------


def add(storage: Storage, takedowns: Iterable[Takedown]) -> Added:
    """Record takedowns beside a dataset, and look up the rows that they match.

    A takedown that matches nothing is recorded too, and applies to rows that are written later.
    """
    head = read_head(storage)
    wanted = sorted({takedown(t.kind, t.value, "takedown", "correct it") for t in takedowns})
    if head.kind != "images" and (unknown := [t for t in wanted if t.kind != "row"]):
        raise DatasetError(
            f"{storage.uri}: a dataset of {head.kind} has no URLs or hashes; add {unknown[0].kind} takedowns to the "
            "images dataset that it was made from"
        )
    before = _Book.read(storage)
    listed = set(_texts(before.listed).to_pylist())
    fresh = [t for t in wanted if str(t) not in listed]
    if fresh:
        # Before the lookup: a download that ends meanwhile either sees the list, or has its parts searched here.
        entries = [(t.kind, t.value, int(t.value) if t.kind == "row" else None) for t in fresh]
        _create(storage, FOLDER, before.next_list, table_of(entries, SCHEMA))
    settle(storage)
    book, stop = _Book.read(storage), read_output(storage).index.rows
    matching = book.entries(book.lookups).filter(pc.field("row") < stop)
    matching = matching.filter(pc.is_in(_texts(matching), pa.array(map(str, wanted), pa.string())))
    matched = set(_texts(matching).to_pylist())
    unmatched = [t for t in wanted if str(t) not in matched]
    return Added(fresh, len(wanted) - len(fresh), sorted(set(matching["row"].to_pylist())), unmatched)


def settle(storage: Storage) -> int:
    """Look up takedowns in the parts written since the last lookup, and store the result for readers.

    Return the number of rows that match: they were taken down while they were being written.
    """
    book = _Book.read(storage)
    if (lookup := book.search()) is None:
        return 0
    _create(storage, f"{FOLDER}looked/", book.next_lookup, lookup.hits.replace_schema_metadata({_KEY: dump(lookup)}))
    return int(pc.count_distinct(lookup.hits["row"]).as_py())


# --- loading ---------------------------------------------------------------------------------------------------------


def load(storage: Storage) -> Tombstones:
    """Load the takedowns that apply to a dataset: its own and those of every ancestor that still exists."""
    return load_from(lineage(storage))


def load_from(chain: Iterable[Storage]) -> Tombstones:
    """Load the takedowns beside some datasets."""
    rows, listed = BitMap64(), [SCHEMA.empty_table()]
    for book in map(_Book.read, chain):
        entries = book.entries([*book.lookups, *filter(None, [book.search()])])
        rows.update(entries["row"].drop_null().to_numpy().astype(np.uint64))
        listed.append(book.listed)
    return Tombstones(rows, pa.concat_tables(listed))


def lineage(storage: Storage) -> Iterator[Storage]:
    """Yield a dataset and its ancestors, nearest first; a deleted one ends the chain, an unreadable one is an error."""
    seen = set[str]()
    while storage.uri not in seen:
        seen.add(storage.uri)
        yield storage
        try:
            upstream = read_manifest(storage).input or {}
        except NotFound:
            return
        if "manifest_digest" not in upstream:
            return
        storage = open_storage(upstream["uri"], storage.options)


# --- stored lists and lookups ----------------------------------------------------------------------------------------


def _pack(units: BitMap64) -> str:
    return base64.b64encode(units.serialize()).decode()


def _unpack(text: str) -> BitMap64:
    return BitMap64.deserialize(base64.b64decode(str(text)))


@dataclass(frozen=True)
class _Lookup:
    """One search of parts for the takedowns of the lists: a file's metadata, and the hits in its table."""

    lists: Whole
    """The number of the first list that the search did not cover."""
    parts: Mapping[int, Annotated[BitMap64, PlainValidator(_unpack), PlainSerializer(_pack)]]
    """The units that were searched, by attempt."""
    hits: Annotated[Any, Field(exclude=True)] = None

    @staticmethod
    def load(data: bytes) -> "_Lookup":
        table = _read(data)
        head = parse_record(_Lookup, (table.schema.metadata or {})[_KEY])
        return replace(head, hits=table.replace_schema_metadata(None))

    def has(self, part: PartKey) -> bool:
        return part[0] in self.parts.get(part[1], ())


@dataclass(frozen=True)
class _Book:
    """All lists and lookups beside one dataset."""

    storage: Storage
    lists: dict[int, pa.Table]
    lookups: list[_Lookup]
    next_lookup: int

    @property
    def next_list(self) -> int:
        """A number that no list has had, not even a deleted one that a lookup covered."""
        return max([0, *(number + 1 for number in self.lists), *(lookup.lists for lookup in self.lookups)])

    @cached_property
    def listed(self) -> pa.Table:
        return pa.concat_tables([SCHEMA.empty_table(), *self.lists.values()])

    def entries(self, lookups: Iterable[_Lookup]) -> pa.Table:
        """Return the lists, and the hits of lookups for what is still listed: a list may have been deleted."""
        hits = pa.concat_tables([SCHEMA.empty_table(), *(lookup.hits for lookup in lookups)])
        return pa.concat_tables([self.listed, hits.filter(pc.is_in(_texts(hits), _texts(self.listed)))])

    @staticmethod
    def read(storage: Storage) -> "_Book":
        lists, lookups, next_lookup = dict[int, pa.Table](), list[_Lookup](), 0
        for name in storage.names(FOLDER):
            if match := _LIST.fullmatch(name):
                lists[int(match[1])] = _read_list(storage, name)
            elif match := _LOOKED.fullmatch(name):
                next_lookup = int(match[1]) + 1
                try:
                    lookups.append(_Lookup.load(storage.read(name)))
                except (ValueError, LookupError, RecursionError, pa.ArrowException, OSError):
                    continue  # damaged: its parts are searched again
        return _Book(storage, lists, lookups, next_lookup)

    def search(self) -> _Lookup | None:
        """Search the parts that no lookup covers; return None if there are none."""
        with_values = [n for n, table in self.lists.items() if pc.any(pc.not_equal(table["kind"], "row")).as_py()]
        if not with_values:
            return None
        # A lookup covers only the lists of its time, so those older than the newest list do not count.
        current = [lookup for lookup in self.lookups if lookup.lists > max(with_values)]
        parts = sorted(part for part in parts_in(self.storage) if not any(lookup.has(part) for lookup in current))
        if not parts:
            return None
        wanted = {kind: _values(self.listed, kind) for kind in ("url", "sha256")}
        units: dict[int, BitMap64] = {}
        for unit, attempt in parts:
            units.setdefault(attempt, BitMap64()).add(unit)
        hits = table_of(in_parts(self.storage, parts, wanted), SCHEMA)
        return _Lookup(max(self.lists) + 1, units, hits)


def _read_list(storage: Storage, name: str) -> pa.Table:
    """Read a list, with URLs in normal form. A damaged one is an error, since its images must not come back."""
    hint = "restore it from a backup, or delete it and add its takedowns again"
    with reading(storage.uri_of(name), hint, "corrupt takedown list"):
        table = _read(storage.read(name))
        kinds = table["kind"].fill_null("")
        named = pc.and_(pc.is_in(kinds, pa.array(KINDS)), table["value"].is_valid())
        placed = pc.if_else(table["row"].is_valid(), pc.greater_equal(table["row"], 0), pc.not_equal(kinds, "row"))
        if (bad := pc.index(pc.and_(named, placed), False).as_py()) >= 0:
            raise ValueError("{kind} {value} {row} is not a takedown".format(**table.slice(bad, 1).to_pylist()[0]))
    unusual = pc.and_(pc.equal(kinds, "url"), pc.invert(pc.match_substring_regex(table["value"], _NORMAL)))
    normal = pa.array(map(_normal, table["value"].filter(unusual).to_pylist()), pa.string())
    values = table["value"].combine_chunks()
    return table.set_column(1, "value", pc.replace_with_mask(values, unusual.combine_chunks(), normal))


def _normal(url: str) -> str:
    try:
        return parse(url).text
    except BadUrl:
        return url


def _values(table: pa.Table, kind: str) -> frozenset[str]:
    """Return the values of a kind in some entries."""
    return frozenset(table.filter(pc.field("kind") == kind)["value"].to_pylist())


def _texts(table: pa.Table) -> pa.ChunkedArray:
    """Return entries as text: kind and value."""
    return pc.binary_join_element_wise(table["kind"], table["value"], " ")


def _read(data: bytes) -> pa.Table:
    table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    return table.cast(SCHEMA.with_metadata(table.schema.metadata))


def _create(storage: Storage, folder: str, first: int, table: pa.Table) -> None:
    data = parquet_bytes(table, write_page_checksum=True)
    for number in range(first, 1_000_000):
        try:
            storage.create(f"{folder}{number:06d}.pq", data)
            return
        except AlreadyExists:
            continue  # another process has just written this number
    raise DatasetError(f"{storage.uri_of(folder)}: too many takedown lists; merge some of them")
