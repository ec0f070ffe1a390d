"""Units cut into pieces.

A piece is a few row groups of the source's files, so that nothing is read twice. Where a row group is larger than a
piece, several pieces share it, and a process that reads some of them goes through it once. An image file counts as a
row group of one row; a unit's samples in a tar count as one row group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sdp.datasets.columns import groups_within
from sdp.datasets.index import Index
from sdp.datasets.manifest import Dataset
from sdp.datasets.units import Work
from sdp.sources.groups import GroupRows, RowGroup, stops_in
from sdp.sources.tars import PICTURES
from sdp.storage import StorageOptions

TAR = ".tar"
_FEW = 32
"""Largest piece, in rows, that is cut straight into single rows."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Rows of a unit that travel together: `take` rows of the row groups, after the first `skip`.

    Pieces of one source sort as their rows do.
    """

    work: Work
    order: int
    """Position in the unit."""
    groups: tuple[RowGroup, ...]
    """Empty if the rows are made rather than read."""
    skip: int
    take: int

    def cut(self, count: int) -> "list[Piece]":
        """Return the same rows in about `count` pieces."""
        size = max(1, -(-self.take // count))
        return [replace(self, skip=self.skip + at, take=min(size, self.take - at)) for at in range(0, self.take, size)]

    def narrow(self) -> "list[Piece]":
        """Return the same rows in smaller pieces, to find the one that kills its worker."""
        # Each level costs two more workers, so the square root is cheaper than halves.
        return self.cut(self.take if self.take <= _FEW else math.isqrt(self.take))


class Planner:
    """Cuts units into pieces by the index and the manifest; reads footers where the source is plain Parquet."""

    def __init__(
        self, index: Index, upstream: Dataset | None, piece_rows: int, options: StorageOptions | None = None
    ) -> None:
        self._index, self._upstream, self._piece_rows, self._options = index, upstream, piece_rows, options
        # There may be millions of row groups, so they stay in Arrow until they are needed.
        paths = upstream.parts["path"].to_pylist() if upstream else []
        self._position = {path: position for position, path in enumerate(paths)}

    def __call__(self, work: Work) -> list[Piece]:
        """Return the pieces of a unit; none if upstream has no rows for it."""
        batches: list[list[GroupRows]] = []
        for group in self._row_groups(work):
            span = _within(group, work)
            rows = _rows_in([span])
            if batches and _rows_in(batches[-1]) + rows <= self._piece_rows:
                batches[-1].append(span)
            elif rows:
                batches.append([span])
        pieces = []
        for order, spans in enumerate(batches):
            groups, rows = tuple(group for group, _, _ in spans), _rows_in(spans)
            pieces += Piece(work, order, groups, spans[0][1], rows).cut(-(-rows // self._piece_rows))
        return pieces

    def _row_groups(self, work: Work) -> Iterator[RowGroup]:
        if self._upstream is not None:
            for path in self._index.parts_of(work):
                if (position := self._position.get(path)) is not None:  # otherwise the manifest does not list it
                    uri = self._upstream.storage.uri_of(path)
                    for number, group in enumerate(self._upstream.parts["row_groups"][position].as_py()):
                        yield RowGroup(uri, number, group["rows"], None)
            return
        for piece in self._index.slices(work.unit.start, work.unit.stop):
            if piece.path.lower().endswith((TAR, *PICTURES)):
                yield RowGroup(piece.path, piece.offset, piece.length, piece.first_row)
                continue
            stops, first = stops_in(piece.path, self._options), piece.first_row - piece.offset
            for number, at in groups_within(stops, work.unit.start - first, work.unit.stop - first):
                yield RowGroup(piece.path, number, int(stops[number]) - at, first + at)


def _within(group: RowGroup, work: Work) -> GroupRows:
    """Return the rows of a row group that may belong to a unit."""
    if group.first_row is None:
        return group, 0, group.rows
    unit = work.unit
    return group, max(0, unit.start - group.first_row), min(group.rows, unit.stop - group.first_row)


def _rows_in(spans: Sequence[GroupRows]) -> int:
    return sum(max(0, stop - start) for _, start, stop in spans)


def spans_of(piece: Piece) -> Iterator[GroupRows]:
    """Yield (row group, start, stop) of a piece's rows."""
    at = 0
    for group in piece.groups:
        start, stop = max(0, piece.skip - at), min(group.rows, piece.skip + piece.take - at)
        at += group.rows
        if start < stop:
            yield group, start, stop
