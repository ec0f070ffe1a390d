"""Units: runs of consecutive addresses, each of which becomes one part."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from sdp.errors import DatasetError

PARTS = "parts/"
_NAME = re.compile(r"parts/(\d{9,15})(?:\.a(\d{3,6}))?\.parquet", re.ASCII)

Addresses = NDArray[np.int64]
PartKey = tuple[int, int]
"""The unit and the attempt of a part."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The addresses [start, stop) that one run of a job added."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """The addresses [start, stop) of one part."""

    number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """One part to write: a unit, and the number of the attempt at it (0 is the first)."""

    unit: Unit
    attempt: int = 0

    @property
    def name(self) -> str:
        return part_name(self.unit.number, self.attempt)


def part_name(unit: int, attempt: int = 0) -> str:
    """Return the path of a unit's part, relative to the dataset."""
    suffix = f".a{attempt:03d}" if attempt else ""
    return f"{PARTS}{unit:09d}{suffix}.parquet"


def parse_part_name(path: str) -> PartKey | None:
    """Return the unit and attempt of a part's path; None for any other path."""
    match = _NAME.fullmatch(path)
    return (int(match[1]), int(match[2] or 0)) if match else None


class Units:
    """The units of a dataset, by number and by address.

    Units never cross an extent, so that existing units stay the same when a source grows.
    """

    def __init__(self, extents: Sequence[Extent], unit_rows: int) -> None:
        for before, after in pairwise(extents):
            if before.stop != after.start:
                raise ValueError(f"extents must follow one another, got {before} and {after}")
        self.extents = tuple(extents)
        self.unit_rows = unit_rows
        self._starts = np.array([e.start for e in extents], dtype=np.int64)
        counts = [-(-(e.stop - e.start) // unit_rows) for e in extents]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]) if counts else np.zeros(1, np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Unit:
        if not 0 <= number < len(self):
            raise IndexError(f"unit {number} of {len(self)}")
        extent_no = int(np.searchsorted(self._first, number, side="right")) - 1
        extent = self.extents[extent_no]
        start = extent.start + (number - int(self._first[extent_no])) * self.unit_rows
        return Unit(number, start, min(start + self.unit_rows, extent.stop))

    def __iter__(self) -> Iterator[Unit]:
        number = count()
        for extent in self.extents:
            for start in range(extent.start, extent.stop, self.unit_rows):
                yield Unit(next(number), start, min(start + self.unit_rows, extent.stop))

    def of_rows(self, rows: Addresses) -> Addresses:
        """Return the unit number of each address."""
        if len(rows) and (not self.extents or rows.min() < self.start or rows.max() >= self.stop):
            outside = rows[(rows < self.start) | (rows >= self.stop)][0]
            raise DatasetError(f"row {outside}: no such address; the dataset has rows {self.start}…{self.stop - 1}")
        extent_no = np.searchsorted(self._starts, rows, side="right") - 1
        return np.asarray(self._first[extent_no] + (rows - self._starts[extent_no]) // self.unit_rows, dtype=np.int64)

    @property
    def start(self) -> int:
        return self.extents[0].start if self.extents else 0

    @property
    def stop(self) -> int:
        return self.extents[-1].stop if self.extents else 0
