"""Row groups of Parquet files, read from their beginning to their end in tables of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdp.datasets.columns import cut, iter_batches, open_parquet, read_footer, row_stops
from sdp.errors import DatasetError, one_line
from sdp.hardware import usable_cores
from sdp.storage import StorageOptions

_FOOTERS = 64


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a source's file."""

    uri: str
    number: int
    """The row group's number in a Parquet file; the first sample's number in a tar."""
    rows: int
    first_row: int | None
    """Address of its first row, if addresses are consecutive; else they are in the column `row`."""


GroupRows = tuple[RowGroup, int, int]
"""Rows of a row group: from the first number, up to the second."""


_unfinished: "dict[tuple[tuple[object, ...], int], _Reader]" = {}
"""Readers of the row group of which this process has last read a part, by the group and the rows that they have passed.
Each holds the group's bytes in the file, and threads that read one group, one for each core, need a reader each."""


def read_rows(
    span: GroupRows, columns: Sequence[str], options: StorageOptions | None, image: str | None = None
) -> Iterator[pa.Table]:
    """Yield the columns that exist, with text cut; reuse the reader of an earlier part of the row group."""
    group, start, stop = span
    key = (group, tuple(columns), options, image)
    passed = [at for of, at in list(_unfinished) if of == key and at <= start]
    reader = _unfinished.pop((key, max(passed)), None) if passed else None
    try:
        reader = reader or _Reader(group, columns, options, image)
        yield from reader.read(start, stop)
    except (pa.ArrowException, OSError) as error:
        cause = one_line(error, 160)
        raise DatasetError(f"{group.uri}: corrupt row group {group.number} ({cause}); make the file again") from error
    if stop < group.rows:
        _unfinished[key, stop] = reader
    others = [held for held in list(_unfinished) if held[0] != key]
    for needless in others or list(_unfinished)[: -usable_cores()]:
        _unfinished.pop(needless, None)


class _Reader:
    """Reads a row group from its beginning to its end, a batch of bounded size at a time."""

    def __init__(self, group: RowGroup, columns: Sequence[str], options: StorageOptions | None, image: str | None):
        self.at = 0
        """The number of rows that have been returned or passed over."""
        self._group, self._image = group, image
        footer = footer_of(group.uri, options)
        file = open_parquet(
            group.uri, options, columns, footer, [group.number], pre_buffer=True, page_checksum_verification=True
        )
        names = [name for name in footer.schema.to_arrow_schema().names if name in columns]
        self._batches = iter_batches(file, names, [group.number], use_threads=False)
        self._rest = file.schema_arrow.empty_table().select(names)

    def read(self, start: int, stop: int) -> Iterator[pa.Table]:
        while self.at < stop:
            if not self._rest.num_rows:
                batch = next(self._batches, None)
                if batch is None:
                    raise DatasetError(f"{self._group.uri}: changed while it was read; run the job again")
                self._rest = cut(pa.Table.from_batches([batch]), self._image)
            rows = min(self._rest.num_rows, (stop if self.at >= start else min(start, stop)) - self.at)
            table, wanted = self._rest.slice(0, rows), self.at >= start
            self.at, self._rest = self.at + rows, self._rest.slice(rows)
            if wanted:
                yield table


footer_of = lru_cache(maxsize=_FOOTERS)(read_footer)
"""Remembers footers, since a file's pieces are read one after another."""


@lru_cache(maxsize=_FOOTERS)
def stops_in(uri: str, options: StorageOptions | None) -> NDArray[np.int64]:
    """Return for each row group of a file the number of rows up to its end."""
    return row_stops(footer_of(uri, options))
