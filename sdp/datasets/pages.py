"""Column chunks of a stranger's Parquet file, whose pages are checked against the footer before Arrow unpacks them.

A footer says how many bytes and values a column chunk has, and each page's header says it again, of which Parquet's
library believes the header. It reads a column chunk whole, so this file looks at each header in what is read.
"""

import io
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sdp.errors import DatasetError

_MOST_BEYOND = 64 << 20
"""Bytes that the pages of a column chunk may hold, whatever the footer says, unless its figure is needed."""
_PAGES, _PAGE_BYTES = 1_000, 1_000
"""Pages that any column chunk may have, and bytes in the file for each more."""
_SIZE, _STORED, _DICTIONARY = 2, 3, 7
_DATA = (5, 8)
"""Fields of a page's header in parquet.thrift: bytes before and after compression, and headers by the page's kind."""
_COUNT = 1
"""The field of those headers with the number of values."""
_BOOLS, _BYTE, _WHOLE, _DOUBLE, _BINARY, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, 12
"""Types of Thrift's compact protocol that a page's header may have."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: int
    stored: int
    held: int
    values: int

    def check(self, data: memoryview) -> None:
        """Raise ValueError if the headers of the pages exceed the footer's figures."""
        at = pages = held = values = 0
        while at < self.stored and values < self.values:
            header, at = _struct(data, at)
            pages, held = pages + 1, held + header[_SIZE]
            values += sum(header[kind][_COUNT] for kind in _DATA if kind in header)
            entries = header[_DICTIONARY][_COUNT] if _DICTIONARY in header else 0
            if min(header[_SIZE], header[_STORED], entries) < 0 or entries > header[_SIZE]:
                raise ValueError
            if held > self.held or values > self.values or pages > _PAGES + at // _PAGE_BYTES:
                raise ValueError
            at += header[_STORED]


def check_pages(
    uri: str,
    file: pa.NativeFile,
    footer: pq.FileMetaData,
    groups: Sequence[int],
    columns: Sequence[int],
    exact: Collection[int] = (),
) -> pa.NativeFile:
    """Return the file; reading these columns raises DatasetError if their pages do not keep to the footer.

    Those of `exact` columns may not hold a byte more than it says.
    """
    lists = {at for at in columns if footer.schema.column(at).max_repetition_level}
    chunks = [(at, group.column(at)) for group in map(footer.row_group, groups) for at in columns]
    growing = [(at, chunk) for at, chunk in chunks if at in lists or _may_grow(chunk)]
    able = [_chunk(chunk, 0 if at in exact else _MOST_BEYOND) for at, chunk in growing]
    return pa.PythonFile(_Checked(uri, file, able), "r") if able else file


def _may_grow(chunk: Any) -> bool:
    """Return whether a column chunk may become more than its bytes in the file."""
    return bool(chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page)


class _Checked(io.RawIOBase):
    """A Parquet file; reading a column chunk fails if its pages contradict the footer."""

    def __init__(self, uri: str, file: pa.NativeFile, chunks: Sequence[_Chunk]) -> None:
        self._uri, self._file = uri, file
        self._chunks = sorted(chunks, key=lambda chunk: chunk.start)

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it has positions."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the position."""
        return int(self._file.tell())

    def read_buffer(self, length: int) -> pa.Buffer:
        """Read bytes without a copy, once the pages in them are checked."""
        start = self.tell()
        data = self._file.read_buffer(length)
        view, stop = memoryview(data).cast("B"), start + data.size
        for chunk in self._chunks[bisect_left(self._chunks, start, key=lambda chunk: chunk.start) :]:
            if chunk.start >= stop:
                break
            if chunk.start + chunk.stored > stop:
                continue  # read only in part, which Parquet does not for a chunk that it unpacks
            try:
                chunk.check(view[chunk.start - start :])
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                raise DatasetError(
                    f"{self._uri}: pages of a column hold more than the footer says; remove the file or write it again"
                ) from None
        return data

    def read(self, length: int | None = -1, /) -> bytes:
        """Read bytes."""
        return bytes(self.read_buffer(-1 if length is None else length))


def _chunk(column: Any, beyond: int) -> _Chunk:
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return _Chunk(start, column.total_compressed_size, max(beyond, column.total_uncompressed_size), column.num_values)


def _struct(data: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by number, and its end; fields that count nothing are None."""
    fields, last = dict[int, Any](), 0
    while head := data[at]:
        at += 1
        if head >> 4:
            last += head >> 4
        else:
            last, at = _number(data, at)
        fields[last], at = _value(data, at, head & 15)
    return fields, at + 1


def _value(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
    if kind in _WHOLE:
        return _number(data, at)
    if kind == _STRUCT:
        return _struct(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return None, at + length
    return None, at + {**dict.fromkeys(_BOOLS, 0), _BYTE: 1, _DOUBLE: 8}[kind]


def _number(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError
