"""Tombstones: takedowns kept beside a dataset, which every stage and every epoch from then on leaves out.

A takedown names an address, a URL or a content hash. URLs and hashes are looked up once, when the list is added, so
that what a stage reads is a set of addresses; addresses are the same in every dataset made from this one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import part_infos
from sdp.datasets.output import read_head, read_json
from sdp.datasets.parts import PartInfo, read_rows
from sdp.errors import AlreadyExists, DatasetError, NotFound, UserError
from sdp.storage import Storage, StorageOptions, open_storage

FOLDER = "_tombstones/"
KINDS = ("row", "url", "sha256")
SCHEMA = pa.schema([("kind", pa.string()), ("value", pa.string()), ("row", pa.int64())])


@dataclass(frozen=True, slots=True, order=True)
class Takedown:
    """One entry of a takedown list."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Tombstones:
    """The takedowns of a dataset and of all that it was made from."""

    rows: BitMap64
    urls: frozenset[str]
    hashes: frozenset[str]

    def mask(self, rows: Sequence[int]) -> list[bool]:
        """For each address, whether it has been taken down."""
        return [row in self.rows for row in rows]

    def __len__(self) -> int:
        return len(self.rows) + len(self.urls) + len(self.hashes)


def parse_list(text: str, where: str) -> list[Takedown]:
    """A takedown list: one `row 123`, `url https://…` or `sha256 ab12…` a line; # begins a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        kind, _, value = entry.partition(" ")
        value = value.strip()
        if kind == "sha256":
            value = value.lower()
        if not _valid(kind, value):
            raise UserError(
                f"{where}:{number}: expected `row NUMBER`, `url URL` or `sha256 HEX`, got {entry[:80]!r}; mend the line"
            )
        found.append(Takedown(kind, value))
    return found


def add(storage: Storage, takedowns: Iterable[Takedown]) -> tuple[pa.Table, list[Takedown]]:
    """Record takedowns beside a dataset. Returns the new entries with their addresses, and those that match nothing.

    What matches nothing is recorded all the same: a later download of it is refused.
    """
    head = read_head(storage)
    already = {Takedown(t["kind"], t["value"]) for t in _entries(storage).to_pylist()}
    wanted = sorted(set(takedowns) - already)
    rows = _look_up(storage, wanted) if head.kind == "images" else {}
    unknown = [t for t in wanted if t.kind != "row" and head.kind != "images"]
    if unknown:
        raise DatasetError(
            f"{storage.uri}: a dataset of {head.kind} has no URLs or hashes; add {unknown[0].kind} takedowns to the "
            "images dataset that it was made from"
        )
    entries = [
        (t.kind, t.value, row) for t in wanted for row in ([int(t.value)] if t.kind == "row" else rows.get(t, [None]))
    ]
    table = pa.table([list(c) for c in zip(*entries, strict=True)] or [[], [], []], schema=SCHEMA)
    if entries:
        _append(storage, table)
    return table, [t for t in wanted if t.kind != "row" and t not in rows]


def load(storage: Storage, options: StorageOptions | None = None) -> Tombstones:
    """The takedowns that hold for a dataset: its own and those of everything upstream that still exists."""
    tables = [_entries(s) for s in lineage(storage, options)]
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    values = {kind: table.filter(pc.field("kind") == kind)["value"].to_pylist() for kind in KINDS}
    rows = table["row"].drop_null().to_numpy()
    return Tombstones(BitMap64(rows.astype(np.uint64)), frozenset(values["url"]), frozenset(values["sha256"]))


def lineage(storage: Storage, options: StorageOptions | None = None) -> list[Storage]:
    """A dataset and those it was made from, nearest first; one that was deleted since ends the chain."""
    chain, seen = [storage], {storage.uri}
    while True:
        try:
            manifest = read_json(chain[-1], "_manifest.json")
        except NotFound:
            return chain
        upstream = manifest.get("input") or {}
        if "manifest_digest" not in upstream or upstream["uri"] in seen:
            return chain
        seen.add(upstream["uri"])
        chain.append(open_storage(upstream["uri"], options))


def _entries(storage: Storage) -> pa.Table:
    files = [pq.ParquetFile(pa.BufferReader(storage.read(name))) for name in storage.names(FOLDER)]
    tables = [file.read().cast(SCHEMA) for file in files]
    return pa.concat_tables([SCHEMA.empty_table(), *tables])


def _append(storage: Storage, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    for number in range(len(storage.names(FOLDER)), 1_000_000):
        try:
            storage.create(f"{FOLDER}{number:06d}.parquet", sink.getvalue())
            return
        except AlreadyExists:
            continue  # somebody else has just added a list; ours is the next
    raise DatasetError(f"{storage.uri_of(FOLDER)}: too many takedown lists")


def _look_up(storage: Storage, takedowns: Sequence[Takedown]) -> dict[Takedown, list[int]]:
    """The addresses of URLs and content hashes, from the parts' own columns."""
    wanted = {kind: pa.array([t.value for t in takedowns if t.kind == kind], pa.string()) for kind in ("url", "sha256")}
    if not any(len(values) for values in wanted.values()):
        return {}
    found: dict[Takedown, list[int]] = {}

    def scan(part: PartInfo) -> list[tuple[Takedown, int]]:
        table = read_rows(storage, part.path, ["row", "url", "sha256"])
        hits = []
        for kind, values in wanted.items():
            matching = table.filter(pc.is_in(table[kind], values))
            pairs = zip(matching[kind].to_pylist(), matching["row"].to_pylist(), strict=True)
            hits += [(Takedown(kind, value), row) for value, row in pairs]
        return hits

    for hits in ordered_map(scan, part_infos(storage), workers=8):
        for takedown, row in hits:
            found.setdefault(takedown, []).append(row)
    return found


def _valid(kind: str, value: str) -> bool:
    if kind == "row":
        return value.isascii() and value.isdigit() and len(value) <= 18
    if kind == "sha256":
        return len(value) == 64 and set(value) <= set("0123456789abcdef")
    return kind == "url" and value.startswith(("http://", "https://"))
