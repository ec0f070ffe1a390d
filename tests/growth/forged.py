"""Small Parquet files that claim or become much: footers with forged numbers, and long text that repeats.

Others end the process that reads their footer: with encrypted columns, or statistics that are cut.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe


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
    # Thrift's compact protocol: 0x16 is the next field, of 64 bits; 0x19 begins the list of row groups.
    end = b"" if everywhere else b"\x19"
    footer = _footer(path)
    _write_footer(path, footer.replace(b"\x16" + _varint(rows) + end, b"\x16" + _varint(claimed) + end))


def claim_bytes(path: Path, claimed: int) -> None:
    """Make the footer of a file of one column and row group claim that its pages hold this many bytes."""
    claim_rows(path, pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size, claimed)


class _NoKms(pe.KmsClient):
    """A key server that encrypts no key."""

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)


def encrypt(path: Path, *, plaintext_footer: bool = True) -> Path:
    """Write a file with an encrypted column of captions."""
    path.parent.mkdir(exist_ok=True)
    table = pa.table({"url": ["http://a"], "caption": ["a"]})
    factory = pe.CryptoFactory(lambda _: _NoKms())
    settings = pe.EncryptionConfiguration("a", column_keys={"b": ["caption"]}, plaintext_footer=plaintext_footer)
    keys = factory.file_encryption_properties(pe.KmsConnectionConfig(), settings)
    with pq.ParquetWriter(path, table.schema, encryption_properties=keys) as writer:
        writer.write_table(table)
    return path


def write_deadly(path: Path) -> Path:
    """Write a file with an encrypted column whose footer has no signature: Parquet's library aborts."""
    _write_footer(encrypt(path), _footer(path)[:-28])
    return path


def cut_statistics(path: Path, most: int) -> None:
    """Cut a column's largest value in the statistics to two bytes: Parquet's library aborts."""
    # 0x28 is the field after the next but one, of bytes.
    value = most.to_bytes(8, "little")
    _write_footer(path, _footer(path).replace(b"\x28\x08" + value, b"\x28\x02" + value[:2]))


def _footer(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def _write_footer(path: Path, footer: bytes) -> None:
    old = _footer(path)
    assert footer != old
    path.write_bytes(path.read_bytes()[: -8 - len(old)] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def _varint(number: int) -> bytes:
    """Return a positive number in zigzag and groups of seven bits."""
    number, groups = number << 1, []
    while number >> 7:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
