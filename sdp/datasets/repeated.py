"""Rows of an images dataset that repeat a lower row: its URL, or its content, found once all parts exist.

The parts stay as they are. For each list of parts that a manifest names, the set of rows with repeated content is
stored beside them; the manifest counts these rows as filtered, and readers leave them out. NAME is the digest of that
list, or `urls-` and the number of rows whose URLs have been compared.

    _repeated/NAME.json            the number of rows; written last
    _repeated/NAME/000000.roaring  the rows
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import Counts
from sdp.datasets.parts import PartInfo, read_rows
from sdp.datasets.records import BadRecord, Whole, dump, parse, reading
from sdp.datasets.units import Addresses
from sdp.errors import NotFound
from sdp.storage import Storage

REASON = "duplicate_content"
_ROWS = "000000.roaring"
PIECE_ROWS = 4_000_000
_PARTITION_ROWS = 16_000_000

Keys = NDArray[np.uint64]
Partitioned = list[tuple[Keys, Addresses]]
"""The keys and rows of each partition."""
Find = Callable[[Sequence[PartInfo], str], int]
"""A function that finds, stores and counts the repeated rows of some parts; the digest is that of their list."""


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of `_repeated/NAME.json`."""

    rows: Whole


@dataclass(frozen=True, slots=True)
class Repeated:
    """A set of repeated rows."""

    storage: Storage
    folder: str

    @property
    def rows(self) -> BitMap64:
        return _load(self.storage, self.folder)

    def __contains__(self, row: int) -> bool:
        return row in self.rows

    def mask(self, rows: Addresses) -> NDArray[np.bool_]:
        members = self.rows
        return np.array([row >= 0 and row in members for row in rows.tolist()], np.bool_)


@lru_cache(maxsize=2)
def _load(storage: Storage, folder: str) -> BitMap64:
    name, hint = f"{folder}/{_ROWS}", f"delete {folder}* and run the job that writes the dataset again"
    with reading(storage.uri_of(name), hint, "not a set of addresses"):
        return BitMap64.deserialize(storage.read(name))


def of_manifest(storage: Storage, manifest_repeated: int, files_digest: str) -> Repeated | None:
    """Return the repeated rows that a manifest counts."""
    return Repeated(storage, folder(files_digest)) if manifest_repeated else None


def known(storage: Storage, name: str) -> int | None:
    """Return the number of repeated rows; None if they have not been found yet."""
    try:
        return parse(_Record, storage.read(f"{folder(name)}.json")).rows
    except (NotFound, BadRecord):  # a damaged record is replaced
        return None


def keep(storage: Storage, name: str, rows: Iterable[Addresses], check: Callable[[], None]) -> int:
    """Store the repeated rows; return their number. `check` checks the lease."""
    members = BitMap64()
    for addresses in rows:
        members.update(addresses.astype(np.uint64))
    members.run_optimize()
    storage.publish_held(f"{folder(name)}/{_ROWS}", members.serialize(), check)
    storage.publish_held(f"{folder(name)}.json", dump(_Record(len(members))), check)
    return len(members)


def without(counts: Counts, repeated: int) -> Counts:
    """Return the counts with this many of the written rows as filtered."""
    if not repeated:
        return counts
    reasons = {**counts.reasons, REASON: counts.reasons.get(REASON, 0) + repeated}
    return Counts(counts.written - repeated, counts.filtered + repeated, counts.failed, dict(sorted(reasons.items())))


# --- the search ------------------------------------------------------------------------------------------------------


def pieces(parts: Sequence[PartInfo]) -> list[list[str]]:
    """Group the parts that have rows into pieces of about PIECE_ROWS rows."""
    groups: list[list[str]] = []
    room = 0
    for part in parts:
        if not part.counts.written:
            continue
        if room < part.counts.written:
            groups.append([])
            room = PIECE_ROWS
        groups[-1].append(part.path)
        room -= part.counts.written
    return groups


def partitions_for(rows: int) -> int:
    """Return the number of partitions into which the search for repeated keys is divided."""
    return max(1, -(-rows // _PARTITION_ROWS))


def read_hashes(storage: Storage, paths: Sequence[str], partitions: int) -> Partitioned:
    """Return 64 bits of the hashes in some parts, with their rows, by partition."""
    table = read_columns(storage, paths, ["row", "sha256"])
    keys = np.array([int(digits[:16], 16) for digits in table["sha256"].to_pylist()], np.uint64)
    return partitioned(keys, table["row"].to_numpy(), partitions)


def read_columns(storage: Storage, paths: Sequence[str], columns: list[str]) -> pa.Table:
    """Return columns of some parts as one table."""
    return pa.concat_tables(ordered_map(lambda path: read_rows(storage, path, columns), paths, workers=8))


def partitioned(keys: Keys, rows: Addresses, partitions: int) -> Partitioned:
    """Return the keys and rows of each partition."""
    return divided(keys % np.uint64(partitions), partitions, keys, rows)


def divided(partition: NDArray[Any], partitions: int, *columns: NDArray[Any]) -> list[Any]:
    """Return the values of each partition, given the partition of each row."""
    order = np.argsort(partition.astype(np.uint16), kind="stable")
    cuts = np.searchsorted(partition[order], np.arange(1, partitions))
    return list(zip(*(np.split(column[order], cuts) for column in columns), strict=True))


def repeated(*shares: tuple[Keys, Addresses]) -> Addresses:
    """Return the sorted addresses of a partition that repeat the key of a lower address."""
    all_keys = np.concatenate([*(keys for keys, _ in shares), np.zeros(0, np.uint64)])
    all_rows = np.concatenate([*(rows for _, rows in shares), np.zeros(0, np.int64)])
    order = np.lexsort((all_rows, all_keys))
    repeats = np.flatnonzero(np.diff(all_keys[order]) == 0) + 1
    return np.sort(all_rows[order[repeats]])


def folder(name: str) -> str:
    """Return the folder of a set of repeated rows."""
    return f"_repeated/{name[:16]}"
