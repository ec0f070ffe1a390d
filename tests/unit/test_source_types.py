"""Source files that disagree on what their columns hold."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets.output import Head, open_output
from sdp.datasets.source import freeze_source, kind_of
from sdp.errors import DatasetError
from sdp.storage import list_source, open_storage


def freeze(root: Path, columns: Sequence[pa.Array]) -> int:
    source = root / "source"
    source.mkdir()
    for number, column in enumerate(columns):
        pq.write_table(
            pa.table({"url": ["http://a"] * len(column), "similarity": column}), source / f"{number}.parquet"
        )
    output = open_output(open_storage(str(root / "out")), Head("images", 10, False, {}))
    return freeze_source(output, list_source(str(source)), ["url", "similarity"]).index.rows


def test_files_of_other_types_are_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"1\.parquet: column similarity holds text, but numbers in .*0\.parquet;"):
        freeze(tmp_path, [pa.array([0.5]), pa.array(["0.5"])])


def test_widths_of_numbers_and_columns_of_nulls_go_together(tmp_path: Path) -> None:
    columns = [pa.array([0.5], pa.float32()), pa.array([1], pa.int8()), pa.nulls(2), pa.array([0.5], pa.float64())]
    assert freeze(tmp_path, columns) == 5


def test_kinds_are_words() -> None:
    kinds = [pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.binary(4), pa.uint64(), pa.list_(pa.int8())]
    assert [kind_of(kind) for kind in kinds] == ["text", "text", "bytes", "numbers", "list<item: int8>"]
