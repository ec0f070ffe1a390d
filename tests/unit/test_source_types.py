"""Source files that disagree on what their columns hold."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets.columns import kind_of, read_footer
from sdp.datasets.output import Head, Output, open_output, read_output
from sdp.datasets.source import freeze_source
from sdp.download.spans import read_span, spans
from sdp.errors import DatasetError
from sdp.storage import list_source, open_storage
from tests.growth.forged import claim_rows, encrypt


def test_kinds_are_words() -> None:
    kinds = [pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.binary(4), pa.uint64(), pa.list_(pa.int8())]
    assert [kind_of(kind) for kind in kinds] == ["text", "text", "bytes", "numbers", "list<item: int8>"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_footer_that_claims_more_rows_than_the_file_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, everywhere: bool
) -> None:
    write(tmp_path / "source", 0, pa.array([0.5] * 250))
    claim_rows(tmp_path / "source/0.parquet", 250, 10**10, everywhere=everywhere)
    with pytest.raises(DatasetError, match=r"0\.parquet: its footer claims 10,000,000,000 rows, with .* in .* bytes;"):
        frozen(tmp_path)
    assert not list((tmp_path / "out").glob("_index/*"))


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_an_encrypted_file_is_refused_before_a_column_is_read(tmp_path: Path, plaintext_footer: bool) -> None:
    file = encrypt(tmp_path / "a.parquet", plaintext_footer=plaintext_footer)
    with pytest.raises(DatasetError, match=r"^\S+/a\.parquet: it is encrypted; remove the file or write it again"):
        read_footer(str(file), None)


# --- one type in all parts -------------------------------------------------------------------------------------------


def write(source: Path, number: int, column: pa.Array) -> None:
    source.mkdir(exist_ok=True)
    pq.write_table(pa.table({"url": ["http://a"] * len(column), "similarity": column}), source / f"{number}.parquet")


def frozen(root: Path, limit: int | None = None) -> Output:
    """Freeze the source beside an output that carries its column; units have two rows."""
    output = open_output(open_storage(str(root / "out")), Head("images", 2, False, {}))
    columns, carried = ["url", "similarity"], ["similarity"]
    freeze_source(output, list_source(str(root / "source")), columns, carried=carried, limit=limit)
    return read_output(output.storage)


def carried(output: Output) -> list[pa.ChunkedArray]:
    """Return the carried column as each part gets it, by address."""
    works = output.index.works()
    tasks = [task for span in spans(output.index, works, 1) for task in read_span(span, ["similarity"], output.storage)]
    return [task.table["similarity"] for task in sorted(tasks, key=lambda task: task.work)]


def test_fractions_beside_whole_numbers_and_nulls_are_fractions_in_every_part(tmp_path: Path) -> None:
    for number, column in enumerate([pa.array([8, 12]), pa.array([0.3, 5.4]), pa.nulls(2)]):
        write(tmp_path / "source", number, column)
    assert [part.type for part in carried(frozen(tmp_path, limit=2))] == [pa.float64()], "the limit fixes no type"
    parts = carried(frozen(tmp_path))
    assert [part.type for part in parts] == [pa.float64()] * 3
    assert math.fsum(value or 0 for part in parts for value in part.to_pylist()) == 25.7


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ([[{"bytes": b"a", "path": "a"}], [{"path": "a"}]], r"1\.parquet: .* holds struct<path: string>, but struct<b"),
        ([[2**53 + 1], [0.5]], r"0\.parquet: column similarity is int64, which this dataset keeps as double"),
    ],
)
def test_values_that_no_common_type_holds_are_refused_in_one_line(tmp_path: Path, columns: Any, line: str) -> None:
    for number, column in enumerate(columns):
        write(tmp_path / "source", number, pa.array(column))
    with pytest.raises(DatasetError, match=line):
        carried(frozen(tmp_path))


def test_a_file_that_is_added_later_is_cast_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "source", 0, pa.array([0.5, 1.5]))
    frozen(tmp_path)
    write(tmp_path / "source", 1, pa.array([7, 8], pa.int16()))
    parts = carried(frozen(tmp_path))
    assert [part.type for part in parts] == [pa.float64()] * 2
    assert parts[1].to_pylist() == [7.0, 8.0]
    write(tmp_path / "source", 2, pa.array(["0.5"]))
    with pytest.raises(DatasetError, match=r"2\.parquet: .* holds string, but double in .*; .* new output\.uri$"):
        frozen(tmp_path)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other/source", 0, pa.nulls(2))
    frozen(tmp_path / "other")  # whose parts have a type without values
    write(tmp_path / "other/source", 1, pa.array([0.5]))
    with pytest.raises(DatasetError, match=r"1\.parquet: .* holds double, but no value in .*; .* new output\.uri$"):
        frozen(tmp_path / "other")


def test_a_column_of_lists_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write(tmp_path / "source", 0, pa.array([["a"], None]))
    with pytest.raises(DatasetError, match=r"^source\.columns: similarity holds list<.*>, .*; leave it out$"):
        frozen(tmp_path)
    assert not list((tmp_path / "out").glob("_index/*"))
