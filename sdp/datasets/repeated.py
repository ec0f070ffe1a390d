"""Rows of an images dataset whose content a lower row has: found when all parts are there, and left out from then on.

The parts stay as they are. Beside them lies, for each list of parts that a manifest has named, the set of those rows;
the manifest counts them as filtered, and what reads the dataset leaves them out.

    _repeated/DIGEST.json            how many; written last
    _repeated/DIGEST/000000.roaring  which
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sdp.datasets import address_sets
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import FILTERED, WRITTEN, Counts
from sdp.datasets.parts import PartInfo, read_rows
from sdp.datasets.records import BadRecord, Whole, parse
from sdp.datasets.units import Rows
from sdp.errors import NotFound
from sdp.storage import Storage

REASON = "duplicate_content"
PIECE_ROWS = 4_000_000
_PARTITION_ROWS = 16_000_000

Keys = NDArray[np.uint64]
Find = Callable[[Sequence[PartInfo], str], int]
"""Finds the repeated rows of some parts, whose list has this digest, and keeps them; returns how many there are."""


@dataclass(frozen=True, slots=True)
class _Known:
    rows: Whole


@dataclass(frozen=True, slots=True)
class Repeated:
    """The repeated rows of a dataset."""

    storage: Storage
    folder: str

    def __contains__(self, row: int) -> bool:
        return address_sets.has(self.storage, self.folder, row)

    def mask(self, rows: Rows) -> NDArray[np.bool_]:
        return address_sets.mask(self.storage, self.folder, rows)

    def overlay(self, account: pa.Table) -> pa.Table:
        """An account in which they are what they are to readers: filtered."""
        again = pa.array(self.mask(account["row"].to_numpy()))
        again = pc.and_(again, pc.equal(account["outcome"], WRITTEN))
        for name, value in (("outcome", FILTERED), ("reason", REASON)):
            at = account.schema.get_field_index(name)
            changed = pc.if_else(again, pa.scalar(value, account.schema.field(at).type), account[name])
            account = account.set_column(at, account.schema.field(at), changed)
        return account


def of(storage: Storage, manifest_repeated: int, files_digest: str) -> Repeated | None:
    """The repeated rows that a manifest speaks of."""
    return Repeated(storage, _folder(files_digest)) if manifest_repeated else None


def known(storage: Storage, files_digest: str) -> int | None:
    """How many a list of parts has, if that has been found out already."""
    try:
        return parse(_Known, storage.read(f"{_folder(files_digest)}.json")).rows
    except (NotFound, BadRecord):  # or what was written down is damaged: it is found out anew
        return None


def keep(storage: Storage, files_digest: str, rows: Iterable[Rows]) -> int:
    """Write down which they are."""
    folder = _folder(files_digest)
    count = address_sets.publish(storage, folder, rows)
    storage.publish(f"{folder}.json", json.dumps({"rows": count, "reason": REASON}).encode())
    return count


def without(counts: Counts, repeated: int) -> Counts:
    """The counts with so many written rows filtered."""
    if not repeated:
        return counts
    reasons = {**counts.reasons, REASON: counts.reasons.get(REASON, 0) + repeated}
    return Counts(counts.written - repeated, counts.filtered + repeated, counts.failed, dict(sorted(reasons.items())))


# --- finding them ----------------------------------------------------------------------------------------------------


def pieces(parts: Sequence[PartInfo]) -> list[list[str]]:
    """The parts with rows in them, in pieces of about PIECE_ROWS rows."""
    found: list[list[str]] = []
    room = 0
    for part in parts:
        if not part.counts.written:
            continue
        if room < part.counts.written:
            found.append([])
            room = PIECE_ROWS
        found[-1].append(part.path)
        room -= part.counts.written
    return found


def partitions_for(rows: int) -> int:
    return max(1, -(-rows // _PARTITION_ROWS))


def look(storage: Storage, paths: Sequence[str], partitions: int) -> list[tuple[Keys, Rows]]:
    """The rows of some parts and 64 bits of their hashes, spread over partitions."""
    tables = ordered_map(lambda path: read_rows(storage, path, ["row", "sha256"]), paths, workers=8)
    table = pa.concat_tables(list(tables))
    rows = table["row"].to_numpy()
    keys = np.array([int(digits[:16], 16) for digits in table["sha256"].to_pylist()], np.uint64)
    which = keys % np.uint64(partitions)
    return [(keys[which == number], rows[which == number]) for number in range(partitions)]


def repeated(keys: Iterable[Keys], rows: Iterable[Rows]) -> Rows:
    """Of all addresses of a partition those whose key a lower address has, too; in order."""
    all_keys, all_rows = np.concatenate([*keys, np.zeros(0, np.uint64)]), np.concatenate([*rows, np.zeros(0, np.int64)])
    order = np.lexsort((all_rows, all_keys))
    again = np.flatnonzero(np.diff(all_keys[order]) == 0) + 1
    return np.sort(all_rows[order[again]])


def _folder(files_digest: str) -> str:
    return f"_repeated/{files_digest[:16]}"
