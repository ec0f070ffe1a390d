"""Near-duplicates: perceptual hashes of pictures, and groups of pictures whose hashes are alike.

Two hashes of 64 bits that differ in at most d bits agree in some b - d of b blocks of bits. So for each choice of d
blocks, the other bits are a key, and only hashes with equal keys are compared. Each search needs the hashes of a
partition of the keys only, which bounds its memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdp.datasets.units import Addresses
from sdp.imaging import Pixels

Hashes = NDArray[np.uint64]
Pairs = tuple[Addresses, Addresses]
"""Addresses of near-duplicates, pair by pair."""

_SIDE, _KEPT = 32, 8
_ALL_PAIRS = 64
"""Most hashes with one key that are all compared with one another; more are searched by the bits that are left."""
_MIX = np.uint64(0x9E3779B97F4A7C15)

_COLUMNS = {"row": pa.int64(), "duplicate_of": pa.int64(), "duplicate": pa.int8()}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()])
"""The columns of the table of near-duplicates: the lowest row of a group has `duplicate` 0, the others 1."""


def perceptual_hash(pixels: Pixels) -> int:
    """Return 64 bits: which of a picture's lowest frequencies are above their median, from the top left corner on."""
    from PIL import Image

    grey = Image.fromarray(pixels).convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    cosines = _cosines()
    # Rounded, so that the noise of zeros, which are all there is in a blank picture, gives no bits.
    low = np.round(cosines @ np.asarray(grey, np.float64) @ cosines.T, 3)
    return int(np.packbits(low > np.median(low)).view(">u8")[0])


@cache
def _cosines() -> NDArray[np.float64]:
    """Return the rows of the discrete cosine transform (type II) for the frequencies that are kept."""
    at = (np.arange(_SIDE) + 0.5) * np.pi / _SIDE
    return np.asarray(2 * np.cos(np.outer(np.arange(_KEPT), at)))


def masks(rows: int, distance: int, bits: int = 2**64 - 1) -> list[int]:
    """Return masks of bits; hashes that differ in at most `distance` of these bits agree under one of the masks."""
    if distance == 0:
        return [bits]
    places = [place for place in range(64) if bits >> place & 1]
    # The fewest blocks, and so searches, with at least about as many possible keys as rows.
    blocks = next(
        (b for b in range(distance + 1, 9) if len(places) * (b - distance) / b >= np.log2(max(rows, 2))), distance + 5
    )
    edges = [len(places) * n // blocks for n in range(blocks + 1)]
    parts = [sum(1 << place for place in places[a:b]) for a, b in pairwise(edges)]
    return [bits - sum(chosen) for chosen in combinations(parts, distance)]


def partition_of(hashes: Hashes, mask: int, partitions: int) -> NDArray[np.int64]:
    """Return the partition of each hash's key."""
    mixed = (hashes & np.uint64(mask)) * _MIX >> np.uint64(32)
    return np.asarray(mixed % np.uint64(partitions), np.int64)


def search(hashes: Hashes, rows: Addresses, mask: int, distance: int, *, equal: bool) -> Pairs:
    """Return pairs of near-duplicates that agree under a mask; with `equal`, also those of equal hashes.

    Only one row of each hash is compared with others: millions of blank pictures may share a hash.
    """
    if not len(hashes):
        return _joined([])
    order = np.argsort(hashes)
    hashes, rows = hashes[order], rows[order]
    starts = _starts(hashes)
    first, hashes = rows[starts], hashes[starts]
    pairs = []
    if equal:
        firsts = np.repeat(first, np.diff(np.append(starts, len(rows))))
        pairs.append((firsts[firsts != rows], rows[firsts != rows]))
    if distance:
        pairs += [(first[a], first[b]) for a, b in _near(hashes, mask, distance, 2**64 - 1)]
    return _joined(pairs)


def _near(hashes: Hashes, mask: int, distance: int, bits: int) -> Iterator[tuple[Addresses, Addresses]]:
    """Yield positions of distinct hashes that agree under a mask and differ in at most `distance` bits."""
    keys = hashes & np.uint64(mask)
    order = np.argsort(keys)
    starts = _starts(keys[order])
    sizes = np.diff(np.append(starts, len(order)))
    for start, size in zip(starts[sizes > _ALL_PAIRS].tolist(), sizes[sizes > _ALL_PAIRS].tolist(), strict=True):
        members = order[start : start + size]
        left = bits & ~mask
        for smaller in masks(size, distance, left):
            yield from ((members[a], members[b]) for a, b in _near(hashes[members], smaller, distance, left))
    starts, sizes = starts[(sizes > 1) & (sizes <= _ALL_PAIRS)], sizes[(sizes > 1) & (sizes <= _ALL_PAIRS)]
    ends = np.repeat(starts + sizes, sizes)
    at = ends - np.repeat(np.cumsum(sizes), sizes) + np.arange(sizes.sum())
    for step in range(1, int(sizes.max(initial=1))):
        inside = at + step < ends
        at, ends = at[inside], ends[inside]
        a, b = order[at], order[at + step]
        alike = np.bitwise_count(hashes[a] ^ hashes[b]) <= distance
        yield a[alike], b[alike]


def _starts(values: Hashes) -> NDArray[np.int64]:
    """Return where each run of equal values starts."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))


def _joined(pairs: Sequence[Pairs]) -> Pairs:
    nothing = np.zeros(0, np.int64)
    return np.concatenate([nothing, *(a for a, _ in pairs)]), np.concatenate([nothing, *(b for _, b in pairs)])


def groups(pairs: Iterable[Pairs]) -> pa.Table:
    """Return the rows of all groups that pairs connect, each with the lowest row of its group, by address."""
    left, right = _joined(list(pairs))
    rows, ends = np.unique(np.concatenate([left, right]), return_inverse=True)
    a, b = ends[: len(left)], ends[len(left) :]
    lowest = np.arange(len(rows))
    while len(a):  # each pair hands the lower of its two roots to the higher, until all pairs have one root
        low, high = np.minimum(lowest[a], lowest[b]), np.maximum(lowest[a], lowest[b])
        lowest[high] = low
        while not np.array_equal(jumped := lowest[lowest], lowest):
            lowest = jumped
        apart = lowest[a] != lowest[b]
        a, b = a[apart], b[apart]
    repeats = (lowest != np.arange(len(rows))).astype(np.int8)
    return pa.table({"row": rows, "duplicate_of": rows[lowest], "duplicate": repeats}, SCHEMA)
