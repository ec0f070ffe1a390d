"""Whatever types a source's columns have, and whatever bytes its text, the parts hold plain, readable columns."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config.download import DownloadSource, FiltersConfig
from sdp.config.shared import Bounds
from sdp.datasets.columns import LARGEST_CELL, kind_of, plain, readable
from sdp.datasets.index import FileSlice
from sdp.datasets.outcomes import WRITTEN, Outcome
from sdp.datasets.units import Unit as Addresses
from sdp.datasets.units import Work
from sdp.download.image import Checked
from sdp.download.plan import Rules, plan
from sdp.download.spans import iter_units
from sdp.download.unit import UnitRun, UnitTask
from tests.growth.forged import repeat_text

TEXTS = [
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.dictionary(pa.int32(), kind) for kind in (pa.string(), pa.large_string())),
]
STORED = Checked(WRITTEN, None, None, b"image", 1, 1, 1, 1, "ab")


def column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return a column of text, possibly as invalid UTF-8 bytes."""
    if pa.types.is_dictionary(kind):
        return column(values, kind.value_type).dictionary_encode().cast(kind)
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    return pa.array(raw, pa.binary()).cast(kind, safe=False)


def part_of(path: Path, *carried: str) -> tuple[pa.Table, list[Outcome]]:
    """Return the part that a source file would become if all its images came, and the refused rows."""
    source = DownloadSource(uri="in", columns=carried)
    rules = Rules(source, FiltersConfig())
    count = pq.read_metadata(path).num_rows
    (table,) = iter_units([count], [FileSlice(str(path), 0, 0, count)], rules.columns(), pa.schema([]))
    rows = np.arange(count)
    unit = UnitRun(UnitTask(Work(Addresses(0, 0, count)), rows, table), rules)
    for wanted in unit.to_fetch:
        unit.settle(Outcome(wanted.row, WRITTEN), STORED)
    sink = io.BytesIO()
    pq.write_table(unit.rows(), sink)
    return pq.read_table(sink), unit.refused


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("kind", TEXTS, ids=str)
def test_text_is_text_in_whatever_type_and_encoding(tmp_path: Path, kind: pa.DataType, encoding: str) -> None:
    urls = ["http://a.org/1", "http://a.org/2", None, b"http://a.org/\xff"]
    captions = ["a cat", b"caf\xe9", "a dog", "a hen"]
    table = pa.table({"url": column(urls, kind), "caption": column(captions, kind), "note": column(captions, kind)})
    how: Any = {"use_dictionary": False, "column_encoding": encoding}
    how = {} if encoding == "RLE_DICTIONARY" else how
    pq.write_table(table, tmp_path / "in.parquet", **how)
    assert encoding in pq.read_metadata(tmp_path / "in.parquet").row_group(0).column(0).encodings
    assert kind_of(kind) in ("text", "bytes")
    part, refused = part_of(tmp_path / "in.parquet", "note")
    assert part["url"].to_pylist() == ["http://a.org/1", "http://a.org/2"]
    assert part["caption"].to_pylist() == ["a cat", "caf\ufffd"]
    is_bytes = kind_of(kind) == "bytes"
    assert part.schema.field("note").type == (pa.binary() if is_bytes else pa.string())
    assert part["note"].to_pylist() == ([b"a cat", b"caf\xe9"] if is_bytes else ["a cat", "caf\ufffd"])
    assert [(outcome.row, outcome.reason) for outcome in refused] == [(2, "bad_url"), (3, "bad_url")]


def test_text_within_a_struct_is_read_in_a_delta_encoding(tmp_path: Path) -> None:
    note = pa.StructArray.from_arrays([pa.array(["one", "two"]).dictionary_encode()], ["text"])
    table = pa.table({"url": ["http://a.org/1", "http://a.org/2"], "caption": ["a cat", "a dog"], "note": note})
    encoding: Any = {"note.text": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, tmp_path / "in.parquet", use_dictionary=False, column_encoding=encoding)
    part, _ = part_of(tmp_path / "in.parquet", "note")
    assert part["note"].to_pylist() == [{"text": "one"}, {"text": "two"}]


def test_a_cell_that_a_tiny_file_repeats_is_cut_and_a_row_that_would_carry_it_fails(tmp_path: Path) -> None:
    columns = {"url": [0, *[1] * 148, 2], "caption": [0] * 150, "note": [1, *[0] * 148, None]}
    path = repeat_text(tmp_path / "in.parquet", ["x" * 10_000_000, "http://a.org/1", "http://a.org/2"], **columns)
    assert path.stat().st_size < 5_000
    part, refused = part_of(path, "note")
    assert part["url"].to_pylist() == ["http://a.org/2"]
    assert set(part["caption"][0].as_py()) == {"x"}
    assert len(part["caption"][0].as_py()) <= LARGEST_CELL + 1
    assert {(outcome.row, outcome.reason) for outcome in refused} == {
        (n, "bad_row" if n else "bad_url") for n in range(149)
    }
    assert refused[1].detail == "column note: more than 65,536 bytes"


def test_a_cell_without_a_dictionary_is_cut_too(tmp_path: Path) -> None:
    table = pa.table({"url": ["http://a.org/1"], "caption": ["x" * 100_000]})
    pq.write_table(table, tmp_path / "in.parquet", use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY")
    (read,) = iter_units([1], [FileSlice(str(tmp_path / "in.parquet"), 0, 0, 1)], ["caption"], pa.schema([]))
    assert read["caption"].to_pylist() == ["x" * (LARGEST_CELL + 1)]


def test_valid_values_are_copied_byte_for_byte() -> None:
    table = pa.table({"note": ["  two\tblanks \x1b[31m", None], "score": pa.array([0.5, None], pa.float32())})
    assert plain(table) is table
    note = table["note"]
    assert readable(note) is note


def test_a_url_that_controls_a_terminal_is_kept_in_its_normal_form(tmp_path: Path) -> None:
    urls = ["http://a.org/\x1b[2J", "HTTP://a.org/As%20It%20Is#here"]
    pq.write_table(pa.table({"url": urls, "caption": ["x", "x"]}), tmp_path / "in.parquet")
    part, _ = part_of(tmp_path / "in.parquet")
    assert part["url"].to_pylist() == ["http://a.org/%1B[2J", urls[1]]


def test_rows_outside_the_bounds_of_any_column_are_not_fetched() -> None:
    table = pa.table({"url": ["http://a/1"] * 4, "caption": ["c"] * 4, "clip": [0.2, 0.3, None, 0.9]})
    bounds = FiltersConfig(columns={"clip": Bounds(min=0.3, max=0.8)})
    rules = Rules(DownloadSource(uri="in"), bounds)
    assert rules.columns() == ["url", "caption", "clip"]
    to_fetch, refused = plan(table, np.arange(4), rules)
    assert [row.row for row in to_fetch] == [1]
    assert {(outcome.row, outcome.reason) for outcome in refused} == {(row, "score:clip") for row in (0, 2, 3)}
