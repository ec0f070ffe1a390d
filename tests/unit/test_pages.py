"""Pages of Parquet files that hold more than the footer says."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets.columns import iter_batches, iter_tables, open_parquet
from sdp.datasets.pages import _Checked, _Chunk, _struct
from sdp.errors import DatasetError
from sdp.sources.groups import RowGroup, read_rows
from sdp.train.data.sources import open_sources
from tests.growth.forged import claim_bytes, claim_rows
from tests.latents import latents_reader
from tests.training import config
from tests.unit.test_train_plain import COLUMNS, nested, write

ROWS = 70
DIFFERENCES: Any = {"column_encoding": "DELTA_BYTE_ARRAY", "write_statistics": False, "store_schema": False}
REFUSED = r"/a\.parquet: pages of a column hold more than the footer says; remove the file or write it again$"


def read_download(path: Path) -> None:
    list(iter_tables(open_parquet(str(path), None, ["caption"]), ["caption"]))


def read_process(path: Path) -> None:
    list(read_rows((RowGroup(str(path), 0, ROWS, 0), 0, ROWS), ["caption"], None))


@pytest.mark.parametrize("read", [read_download, read_process])
def test_text_whose_size_a_footer_hides_is_refused_before_it_is_unpacked(
    read: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    captions = [f"{row}{'x' * 1_000_000}" for row in range(ROWS)]
    pq.write_table(pa.table({"caption": captions}), path, compression="zstd", use_dictionary=False, store_schema=False)
    claim_bytes(path, 1_000)
    before = pa.default_memory_pool().bytes_allocated()
    with pytest.raises(DatasetError, match=REFUSED):
        read(path)
    assert pa.default_memory_pool().bytes_allocated() - before < 1_000_000


@pytest.mark.parametrize("read", [read_download, read_process])
def test_text_that_grows_by_its_differences_is_refused_within_bounded_memory(
    read: Callable[[Path], None], tmp_path: Path
) -> None:
    path, lying = tmp_path / "a.parquet", tmp_path / "lying/a.parquet"
    captions = pa.table({"caption": ["x" * 1_000_000] * ROWS})
    pq.write_table(captions, path, compression="zstd", use_dictionary=False, **DIFFERENCES)
    assert path.stat().st_size < 1_000
    first = next(iter_batches(open_parquet(str(path), None, ["caption"]), ["caption"], [0]))
    assert first.num_rows == 67, "64 MiB"
    with pytest.raises((DatasetError, pa.ArrowInvalid), match="text of caption becomes more than 67,108,864 bytes"):
        read(path)
    lying.parent.mkdir()
    lying.write_bytes(path.read_bytes())
    claim_bytes(lying, 1_000)
    with pytest.raises(DatasetError, match=REFUSED):
        read(lying)


def test_lists_of_text_that_grows_by_its_differences_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    encoding: Any = {"caption.list.element": "DELTA_BYTE_ARRAY"}
    pq.write_table(pa.table({"caption": [["a cat", "a dog"]]}), path, use_dictionary=False, column_encoding=encoding)
    with pytest.raises(DatasetError, match=r"/a\.parquet: column caption.list.element has lists of text in a delta"):
        read_download(path)


def test_latents_of_more_numbers_than_the_footer_says_are_refused(tmp_path: Path) -> None:
    write(tmp_path, nested)
    claim_rows(tmp_path / "latents/a.parquet", 7 * 256, 7)
    sources = open_sources(config(tmp_path, source__columns=COLUMNS), write=lambda: None)
    with pytest.raises(DatasetError, match=REFUSED):
        next(latents_reader(*sources.datasets).batches(0, 0, 8))


def test_lists_of_more_values_than_the_footer_says_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"caption": [[7] * 5_000] * 10}), path, store_schema=False)
    list(iter_tables(open_parquet(str(path), None, ["caption"]), ["caption"]))
    claim_rows(path, 50_000, 10)
    with pytest.raises(DatasetError, match=REFUSED):
        read_download(path)


def test_whole_files_of_every_form_are_read(tmp_path: Path) -> None:
    rows = 3_000
    table = pa.table(
        {
            "text": [f"{row * 7919 % rows}{'x' * (row % 50)}" for row in range(rows)],
            "some": [None if row % 7 == 0 else "a cat " * (row % 9) for row in range(rows)],
            "none": pa.nulls(rows, pa.string()),
            "list": [[7] * (row % 5) for row in range(rows)],
            "number": pa.array(np.arange(rows) % 9, pa.int32()),
            "flag": pa.array(np.arange(rows) % 2 > 0),
            "bytes": pa.array([bytes(row % 300) for row in range(rows)]),
        }
    )
    forms: dict[str, list[Any]] = {
        "compression": ["none", "snappy", "gzip", "zstd", "lz4", "brotli"],
        "data_page_version": ["1.0", "2.0"],
        "use_dictionary": [True, False],
        "row_group_size": [rows, 700],
    }
    for form in product(*forms.values()):
        path = tmp_path / "a.parquet"
        options = dict(zip(forms, form, strict=True))
        pq.write_table(table, path, data_page_size=5_000, write_page_checksum=True, **options)
        for buffered in (False, True):
            file = open_parquet(str(path), None, table.column_names, pre_buffer=buffered)
            assert sum(batch.num_rows for batch in iter_tables(file, table.column_names)) == rows


def pages(values: int) -> bytes:
    """Return a page's header in Thrift: eight bytes, stored as none, with so many values."""
    size, stored, head = b"\x25\x10", b"\x15\x00", b"\x2c\x15" + bytes([2 * values]) + b"\x00"
    return size + stored + head + b"\x00"


def test_a_lying_chunk_is_found_within_one_that_is_read_in_part() -> None:
    data = pa.BufferReader(bytes(4) + pages(values=9) + bytes(100))
    around, lying = _Chunk(4, 10_000, 1, 1), _Chunk(4, len(pages(values=9)), 1_000, 8)
    assert _Checked("a", data, [around]).read_buffer(50).size == 50
    data.seek(0)
    with pytest.raises(DatasetError, match="pages of a column hold more than the footer says"):
        _Checked("a", data, [around, lying]).read_buffer(50)


@pytest.mark.parametrize("header", [b"", b"\x1c" * 10_000, b"\x15" + b"\xff" * 20, b"\x13\0", b"\x18\x7f", b"\xf5\x01"])
def test_a_header_that_ends_early_or_never_is_refused(header: bytes) -> None:
    with pytest.raises((IndexError, KeyError, RecursionError, ValueError)):
        _struct(memoryview(header), 0)
