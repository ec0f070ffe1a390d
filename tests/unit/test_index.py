"""The source index: addresses that never change their meaning."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.datasets import index as index_files
from sdp.datasets.index import _Spans, files_table
from sdp.datasets.output import read_output
from sdp.datasets.source import freeze_source
from sdp.errors import DatasetError
from sdp.storage import list_source
from tests.kit import begin_images, write_source


def test_addresses_are_read_from_the_rows_of_their_files(tmp_path: Path) -> None:
    index = begin_images(tmp_path).index
    slices = index.slices(20, 30)
    assert [(s.first_row, s.offset, s.length) for s in slices] == [(20, 20, 5), (25, 0, 5)]
    (last,) = index.slices(41, 42)
    assert pq.read_table(last.path.removeprefix("file://"))["URL"][last.offset].as_py() == "http://host/41"
    with pytest.raises(DatasetError, match="row 42: no such address"):
        index.slices(1, 43)


def test_files_that_have_come_are_appended_even_if_their_names_sort_first(tmp_path: Path) -> None:
    output = begin_images(tmp_path)
    before = begin_images(tmp_path).index
    assert output.storage.names(index_files.FOLDER) == [index_files.version_name(0)], "nothing was new"
    write_source(tmp_path / "source", [("0-first.parquet", 8)], first=100)
    after = begin_images(tmp_path).index
    assert after.files.slice(0, 2) == before.files
    assert list(after.units)[: len(before.units)] == list(before.units)
    assert (before.rows, after.rows) == (42, 50)


def test_a_limit_that_is_raised_adds_units_and_leaves_the_old_ones(tmp_path: Path) -> None:
    begun = begin_images(tmp_path, limit=15).index
    assert [(u.start, u.stop) for u in begun.units] == [(0, 10), (10, 15)]
    assert begun.files.num_rows == 1, "the second file was not opened"
    assert [(u.start, u.stop) for u in begin_images(tmp_path, limit=27).index.units] == [
        (0, 10), (10, 15), (15, 25), (25, 27),
    ]  # fmt: skip
    assert begin_images(tmp_path, limit=5).index.rows == 27


def test_a_source_file_that_changed_is_refused_by_name(tmp_path: Path) -> None:
    begin_images(tmp_path)
    write_source(tmp_path / "source", [("b.parquet", 3)])
    with pytest.raises(DatasetError, match=r"b\.parquet has changed since its rows got their addresses"):
        begin_images(tmp_path)


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    output = begin_images(tmp_path, limit=1)
    write_source(tmp_path / "other", [("c.parquet", 3)])
    with pytest.raises(DatasetError, match=r"no column caption; it has URL, TEXT"):
        freeze_source(output, list_source(str(tmp_path / "other")), ["URL", "caption"])


def test_a_source_without_rows_is_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "source", [("a.parquet", 0)])
    with pytest.raises(DatasetError, match="without any row"):
        begin_images(tmp_path)


def test_a_source_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    write_source(tmp_path / "source", [("a.parquet", 4)])
    (tmp_path / "source" / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DatasetError, match=r"b\.parquet: not a readable Parquet file"):
        begin_images(tmp_path)


def test_one_of_two_jobs_that_extend_an_index_is_refused(tmp_path: Path) -> None:
    first = begin_images(tmp_path, limit=10)
    stale = read_output(first.storage)
    begin_images(tmp_path, limit=20)
    with pytest.raises(DatasetError, match="another job has just changed"):
        freeze_source(stale, list_source(str(tmp_path / "source")), ["URL"], limit=30)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12), st.integers(0, 80), st.integers(1, 30))
def test_a_units_files_are_those_that_overlap_it_in_their_order(
    spans: list[tuple[int, int]], start: int, rows: int
) -> None:
    files = files_table((f"{n}", 1, None, first, count, count, 0) for n, (first, count) in enumerate(spans))
    expected = [n for n, (first, count) in enumerate(spans) if first < start + rows and first + count > start]
    assert _Spans(files).overlapping(start, start + rows).to_pylist() == expected
