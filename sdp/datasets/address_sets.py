"""Sets of addresses as large as a dataset, stored in shards, so that a lookup reads only the shards of its rows."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from sdp.datasets.records import reading
from sdp.datasets.units import Addresses
from sdp.errors import NotFound
from sdp.storage import Storage

_SHARD_ROWS = 1 << 26
_NAME = re.compile(r"/(\d{6})\.roaring$", re.ASCII)


def publish(storage: Storage, folder: str, rows: Iterable[Addresses], check: Callable[[], None]) -> int:
    """Write the set as FOLDER/000000.roaring and so on; return its number of addresses. `check` checks the lease."""
    matches = (_NAME.search(name) for name in storage.names(folder))
    shards = {int(match[1]): BitMap64() for match in matches if match}  # what an interrupted job has left
    for addresses in rows:
        numbers = addresses // _SHARD_ROWS
        for number in np.unique(numbers).tolist():
            shards.setdefault(number, BitMap64()).update(addresses[numbers == number].astype(np.uint64))
    for number, bitmap in shards.items():
        bitmap.run_optimize()
        storage.publish_held(_name(folder, number), bitmap.serialize(), check)
    return sum(map(len, shards.values()))


def within(storage: Storage, folder: str, start: int, stop: int) -> BitMap64:
    """Return the addresses of [start, stop) that are in the set."""
    members = BitMap64()
    for number in range(start // _SHARD_ROWS, max(start, stop - 1) // _SHARD_ROWS + 1):
        members |= _shard(storage, folder, number) & BitMap64(range(start, stop))
    return members


def mask(storage: Storage, folder: str, rows: Addresses) -> NDArray[np.bool_]:
    """Return for each address whether it is in the set."""
    members = np.zeros(len(rows), np.bool_)
    numbers = rows // _SHARD_ROWS
    for number in np.unique(numbers[rows >= 0]).tolist():
        shard, in_shard = _shard(storage, folder, number), numbers == number
        members[in_shard] = [row in shard for row in rows[in_shard].tolist()]
    return members


@lru_cache(maxsize=8)
def _shard(storage: Storage, folder: str, number: int) -> BitMap64:
    try:
        data = storage.read(_name(folder, number))
    except NotFound:
        return BitMap64()
    hint = f"delete {folder}* and run the job that writes the dataset again"
    with reading(storage.uri_of(_name(folder, number)), hint, "not a set of addresses"):
        return BitMap64.deserialize(data)


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:06d}.roaring"
