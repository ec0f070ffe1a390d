"""Small Parquet files that claim or become much: footers with forged numbers of rows, and long text that repeats."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def repeat_text(path: Path, values: Sequence[str], **columns: Sequence[int | None]) -> Path:
    """Write a file whose columns hold some of the values by their positions, each value once in the file."""
    dictionary = pa.array(values)
    arrays = {
        name: pa.DictionaryArray.from_arrays(pa.array(at, pa.int32()), dictionary) for name, at in columns.items()
    }
    pq.write_table(pa.table(arrays), path, compression="zstd", store_schema=False)
    return path


def claim_rows(path: Path, rows: int, claimed: int, *, everywhere: bool = True) -> None:
    """Make a footer claim another number of rows: in all its figures, or in the file's total only."""
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer, body = data[-8 - length : -8], data[: -8 - length]
    # Thrift's compact protocol: 0x16 is the next field, of 64 bits; 0x19 begins the list of row groups.
    end = b"" if everywhere else b"\x19"
    forged = footer.replace(b"\x16" + _varint(rows) + end, b"\x16" + _varint(claimed) + end)
    assert forged != footer
    path.write_bytes(body + forged + len(forged).to_bytes(4, "little") + b"PAR1")


def _varint(number: int) -> bytes:
    """Return a positive number in zigzag and groups of seven bits."""
    number, groups = number << 1, []
    while number >> 7:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
