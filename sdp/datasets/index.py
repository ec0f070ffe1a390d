"""The source index: a frozen list of the source's files, so that an address always means the same row.

It is stored in versions beside the output (`_index/000000.pq`, …). The first lists the source's files; a later one
adds files that were appended, or requests another attempt at failed rows. No version is ever rewritten.
"""

import base64
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.datasets.columns import parquet_bytes, table_of
from sdp.datasets.records import Whole, dump, parse, reading
from sdp.datasets.units import Extent, PartKey, Units, Work
from sdp.errors import AlreadyExists, DatasetError
from sdp.storage import Storage
from sdp.storage.uri import below, join, near, resolved

FOLDER = "_index/"
_KEY = b"sdp.index"
_NAME = re.compile(r"_index/\d{6}\.pq", re.ASCII)

FILES_SCHEMA = pa.schema(
    [
        # The URI, stored relative to the source's root; if the source is a dataset, the part's path in it.
        pa.field("path", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("etag", pa.string()),
        pa.field("first_row", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),  # addresses that the file spans
        pa.field("written", pa.int64(), nullable=False),  # rows in the file; fewer than `rows` if some failed upstream
        pa.field("attempt", pa.int16(), nullable=False),  # the attempt upstream that wrote it; 0 for plain files
    ]
)


@dataclass(frozen=True, slots=True)
class Version:
    """One request for work: new addresses, or another attempt at existing units."""

    number: int
    files: pa.Table
    extent: Extent | None = None
    """The new addresses; None for a retry."""
    attempt: int = 0
    units: tuple[int, ...] = ()
    """The units to attempt again, in a retry."""
    root: str = ""
    """The source's folder at the time of this version; empty if the source is a dataset."""
    columns: pa.Schema = field(default_factory=lambda: pa.schema([]))
    """The types, in all parts, of the columns copied from the source; only the first version has them."""

    def moved(self, root: str) -> "Version":
        """Return the same version with its files below another root."""
        if not self.root or self.root == root:
            return self
        paths = [join(root, below(path, self.root)) for path in self.files["path"].to_pylist()]
        return replace(self, root=root, files=self.files.set_column(0, FILES_SCHEMA.field(0), pa.array(paths)))


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Consecutive rows of one source file."""

    path: str
    first_row: int
    """Address of the slice's first row."""
    offset: int
    """Position of that row in the file, for a file that holds every address that it spans."""
    length: int


@dataclass(frozen=True)
class Index:
    """All versions of a source index together."""

    versions: tuple[Version, ...]
    unit_rows: int
    files: pa.Table = field(init=False, repr=False)
    """The files that span the address space, by first row. Those of retries, and texts, are only in `versions`."""
    units: Units = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A file's attempt is the one upstream, a version's is our own.
        adds_addresses = (pc.field("attempt") == 0) & (pc.field("rows") > 0)
        tables = [v.files.filter(adds_addresses) for v in self.versions if v.attempt == 0]
        files = pa.concat_tables([FILES_SCHEMA.empty_table(), *tables]).combine_chunks()
        extents = [v.extent for v in self.versions if v.extent is not None]
        object.__setattr__(self, "files", files)
        object.__setattr__(self, "units", Units(extents, self.unit_rows))

    @property
    def root(self) -> str:
        """The last known URI of the source; empty if unknown."""
        return next((version.root for version in reversed(self.versions) if version.root), "")

    @property
    def columns(self) -> pa.Schema:
        """The columns that parts copy from the source."""
        return self.versions[0].columns if self.versions else pa.schema([])

    def moved(self, root: str) -> "Index":
        """Return the index with all files below another root."""
        return Index(tuple(version.moved(root) for version in self.versions), self.unit_rows)

    @property
    def rows(self) -> int:
        """The number of addresses added so far."""
        return self.units.stop

    @property
    def listed_rows(self) -> int:
        """The number of addresses in all listed files; more than `rows` if a limit holds some back."""
        if not self.files.num_rows:
            return 0
        return int(self.files["first_row"][-1].as_py()) + int(self.files["rows"][-1].as_py())

    def slices(self, start: int, stop: int) -> list[FileSlice]:
        """Return the slices of files that hold the addresses [start, stop), in order."""
        if stop > self.listed_rows:
            raise DatasetError(f"row {stop - 1}: no such address; the source has rows 0…{self.listed_rows - 1}")
        slices = []
        for row in self.files.take(self._spans.overlapping(start, stop)).to_pylist():
            begin, end = max(start, row["first_row"]), min(stop, row["first_row"] + row["rows"])
            if begin < end:
                slices.append(FileSlice(row["path"], begin, begin - row["first_row"], end - begin))
        return slices

    def works(self) -> list[Work]:
        """Return the work for every part: first units 0, 1, …, then retries."""
        works = [Work(unit) for unit in self.units]
        for version in self.versions:
            works += [Work(self.units[number], version.attempt) for number in version.units]
        return works

    def works_by_part(self) -> dict[PartKey, Work]:
        """Return all works by unit and attempt. Readers must ignore a part that is not among them."""
        return {(work.unit.number, work.attempt): work for work in self.works()}

    def parts_of(self, work: Work) -> list[str]:
        """Return the parts upstream that hold a work's rows, in order, if the source is a dataset."""
        unit, first = work.unit, 0
        if work.attempt:
            version = next(v for v in self.versions if v.attempt == work.attempt)
            first = version.number if version.files.num_rows else 0  # a retry upstream wrote new rows
        else:
            version = next(v for v in self.versions if v.extent and v.extent.start <= unit.start < v.extent.stop)
        listed = self._files_by_version[first : version.number + 1]
        by_version = (paths.take(spans.overlapping(unit.start, unit.stop)).to_pylist() for paths, spans in listed)
        return list(dict.fromkeys(path for paths in by_version for path in paths))

    @cached_property
    def _spans(self) -> "_Spans":
        return _Spans(self.files)

    @cached_property
    def _files_by_version(self) -> "list[tuple[pa.ChunkedArray, _Spans]]":
        return [(version.files["path"], _Spans(version.files)) for version in self.versions]


class _Spans:
    """The addresses that files span, sorted, so that a binary search finds those of a unit."""

    def __init__(self, files: pa.Table) -> None:
        first = files["first_row"].to_numpy()
        self._order = np.argsort(first, kind="stable")
        self._first, self._rows = first[self._order], files["rows"].to_numpy()[self._order]
        self._longest = int(self._rows.max(initial=0))

    def overlapping(self, start: int, stop: int) -> pa.Array:
        """Return the positions, in the files' own order, of those that span some of the addresses [start, stop)."""
        low = int(np.searchsorted(self._first, start - self._longest, side="right"))
        high = int(np.searchsorted(self._first, stop, side="left"))
        overlaps = self._first[low:high] + self._rows[low:high] > start
        return pa.array(np.sort(self._order[low:high][overlaps]))


@dataclass(frozen=True, slots=True)
class _VersionHead:
    """The metadata of a version's file."""

    extent: tuple[Whole, Whole] | None
    attempt: Whole
    units: tuple[Whole, ...]
    root: str = ""
    """The source's folder, as `uri.near` writes it. The table's paths are relative to the folder."""
    columns: str = ""
    """The copied columns as an Arrow schema, in base64."""


def version_name(number: int) -> str:
    return f"{FOLDER}{number:06d}.pq"


def load(storage: Storage, unit_rows: int) -> Index:
    """Load the index of an output, empty if it is new; files with other names are ignored."""
    names = [name for name in storage.names(FOLDER) if _NAME.fullmatch(name)]
    versions = tuple(_read_version(storage, name, number) for number, name in enumerate(names))
    for number, name in enumerate(names):
        if name != version_name(number):
            raise DatasetError(f"{storage.uri_of(name)}: expected {version_name(number)}; the index is damaged")
    with _reading(storage, FOLDER):
        index = Index(versions, unit_rows)
        index = index.moved(index.root)  # older versions may name the folder where the source was before
        for version in versions:
            for number in version.units:
                index.units[number]  # raises for a unit that does not exist
    return index


def append(storage: Storage, index: Index, version: Version) -> Index:
    """Publish a version under the next number. One of several writers succeeds; the others raise DatasetError."""
    root, extent = version.root, version.extent
    version = replace(version, number=len(index.versions), files=version.files.cast(FILES_SCHEMA))
    stored_root = near(root, storage.uri) if root else ""
    columns = base64.b64encode(version.columns.serialize()).decode() if version.columns.names else ""
    new_rows = (extent.start, extent.stop) if extent else None
    head = _VersionHead(new_rows, version.attempt, version.units, stored_root, columns)
    relative = [below(path, root) for path in version.files["path"].to_pylist()]
    table = version.files.set_column(0, FILES_SCHEMA.field(0), pa.array(relative, pa.string()))
    table = table.replace_schema_metadata({_KEY: dump(head)})
    try:
        storage.create(version_name(version.number), parquet_bytes(table, write_page_checksum=True))
    except AlreadyExists as error:
        raise DatasetError(f"{storage.uri}: another job has just changed this dataset's index; run again") from error
    return Index((*index.versions, version), index.unit_rows)


def files_table(files: Iterable[tuple[str, int, str | None, int, int, int, int]]) -> pa.Table:
    """Return rows of (path, size, etag, first_row, rows, written, attempt) as a table."""
    return table_of(files, FILES_SCHEMA)


def _read_version(storage: Storage, name: str, number: int) -> Version:
    with _reading(storage, name):
        # pq.read_table would import a query engine, which takes longer than reading the file.
        table = pq.ParquetFile(pa.BufferReader(storage.read(name)), page_checksum_verification=True).read()
        head = parse(_VersionHead, (table.schema.metadata or {})[_KEY])
        files = table.replace_schema_metadata(None).cast(FILES_SCHEMA)
        root = resolved(head.root, storage.uri)
        if root:
            paths = [join(root, path) for path in files["path"].to_pylist()]
            files = files.set_column(0, FILES_SCHEMA.field(0), pa.array(paths, pa.string()))
        columns = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(head.columns))) if head.columns else pa.schema([])
        extent = Extent(*head.extent) if head.extent else None
        return Version(number, files, extent, head.attempt, head.units, root, columns)


def _reading(storage: Storage, name: str) -> AbstractContextManager[None]:
    hint = "restore it from a backup, since this dataset's addresses have no meaning without it"
    return reading(storage.uri_of(name), hint, "corrupt index")
