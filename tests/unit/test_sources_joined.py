"""Tables of captions and scores that are joined to the rows of a source, and the rows that they leave out."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config.process import JoinedTable
from sdp.datasets.output import Head, open_output
from sdp.datasets.scores import Score
from sdp.errors import ConfigError, DatasetError, UserError
from sdp.process.prepare import begin, prepare
from sdp.sources import joined
from sdp.sources.pictures import Pictures, Selection, open_pictures
from sdp.sources.reading import SourceRow, read_piece
from sdp.storage import StorageOptions, open_storage
from tests.kit import write_files
from tests.process_kit import config_of, make_images, picture, write_plain

OPTIONS = StorageOptions()


def write_table(path: Path, columns: dict[str, Any], group: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def table_of(uri: Path, **settings: str) -> JoinedTable:
    return JoinedTable(uri=str(uri), **settings)


def open_with(source: Path, *tables: JoinedTable, **settings: Any) -> Pictures:
    return open_pictures("source", str(source), OPTIONS, Selection(required=True, tables=tables, **settings))


def rows_of(pictures: Pictures, out: Path, piece: int = 7) -> list[SourceRow]:
    head = Head("latents", 25, pictures.dataset is not None, {})
    output = pictures.freeze(open_output(open_storage(str(out)), head), None)
    planner = pictures.planner(output, piece, OPTIONS)
    pieces = [planned for work in output.pending() for planned in planner(work)]
    return [row for planned in pieces for row in read_piece(planned, pictures.columns, options=OPTIONS)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows 0 to 59 without 7, 17, …; keys k0 to k59, captions `picture number N`."""
    root = tmp_path_factory.mktemp("images")
    make_images(root, rows=60, unit_rows=20)
    return root / "images"


# --- the join --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 60])
def test_a_table_is_joined_by_address_across_its_row_groups(images: Path, tmp_path: Path, piece: int) -> None:
    for name, rows in (("b", range(13, 31)), ("a", range(33, 200)), ("c", range(5, 10))):  # not in the files' order
        new = {"row": pa.array(rows, pa.int32()), "caption": [f"new {row}" for row in rows]}
        write_table(tmp_path / f"table/{name}.parquet", new, group=4)
    rows = rows_of(open_with(images, table_of(tmp_path / "table")), tmp_path / "out", piece)
    assert len(rows) == 54
    has_entry = {*range(5, 10), *range(13, 31), *range(33, 60)}
    for row in rows:
        assert row.caption == (f"new {row.row}" if row.row in has_entry else f"picture number {row.row}")
        assert row.filtered == ""


def test_only_the_row_groups_of_a_pieces_addresses_are_read(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = range(1000)
    table = write_table(tmp_path / "t.parquet", {"row": rows, "caption": [f"new {row}" for row in rows]})
    pictures, read, read_rows = open_with(images, table_of(table)), list[int](), joined.read_rows
    monkeypatch.setattr(joined, "read_rows", lambda span, *rest: read.append(span[0].number) or read_rows(span, *rest))
    assert len(rows_of(pictures, tmp_path / "out", piece=20)) == 54
    assert read == [0, 1, 2, 3, 4, 5], "each once, and none of the others"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_a_table_is_joined_by_text_in_any_order(images: Path, tmp_path: Path, kind: pa.DataType) -> None:
    keys = pa.array(["k4", "elsewhere", "k1", None, "k59"]).cast(kind)
    table = write_table(tmp_path / "t.parquet", {"id": ["?"] * 5, "key": keys, "caption": list("dxb?z")}, group=2)
    rows = rows_of(open_with(images, table_of(table, by="key")), tmp_path / "out")
    assert {row.row: row.caption for row in rows if "number" not in (row.caption or "")} == {1: "b", 4: "d", 59: "z"}


def test_files_of_a_table_may_differ_in_type(images: Path, tmp_path: Path) -> None:
    scores = [pa.array([1, 2]), pa.array([0.5, None]), pa.nulls(2)]
    captions = [pa.array(["a", "b"]), pa.array([b"c", b"d"]), pa.array(["e", "f"]).dictionary_encode()]
    for number, (score, caption) in enumerate(zip(scores, captions, strict=True)):
        rows = pa.array([2 * number, 2 * number + 1], pa.int64() if number else pa.int32())
        write_table(tmp_path / f"t/{number}.parquet", {"row": rows, "score": score, "caption": caption})
    bounds = [Score("score:score", "score", minimum=1.0)]
    rows = rows_of(open_with(images, table_of(tmp_path / "t"), scores=bounds), tmp_path / "out")
    assert [(row.caption, row.filtered) for row in rows[:6]] == [
        ("a", ""), ("b", ""), ("c", "score:score"), ("d", "score:score"), ("e", "score:score"), ("f", "score:score")
    ]  # fmt: skip


def test_rows_without_an_entry_are_filtered_if_the_table_says_so(images: Path, tmp_path: Path) -> None:
    subset = write_table(tmp_path / "subset.parquet", {"row": [3, 7, 20]})
    rows = rows_of(open_with(images, table_of(subset, missing="drop")), tmp_path / "out")
    assert [row.row for row in rows if not row.filtered] == [3, 20], "row 7 has no image"
    assert {row.filtered for row in rows} == {"", "not_in_table"}


def test_pictures_with_the_same_key_share_its_entry(tmp_path: Path) -> None:
    source = {"image": [b"a", b"b", b"c"], "url": ["u", None, "u"], "caption": ["old"] * 3}
    write_table(tmp_path / "source/p.parquet", source)
    table = write_table(tmp_path / "t.parquet", {"url": ["u"], "caption": ["new"]})
    rows = rows_of(open_with(tmp_path / "source", table_of(table, by="url")), tmp_path / "out")
    assert [row.caption for row in rows] == ["new", "old", "new"]


def test_a_later_table_comes_first_and_null_or_empty_is_no_entry(images: Path, tmp_path: Path) -> None:
    first = write_table(tmp_path / "1.parquet", {"row": [0, 1, 2], "caption": ["a", "b", "c"]})
    later = write_table(tmp_path / "2.parquet", {"row": [0, 1, 2], "caption": ["", "B", None]})
    rows = rows_of(open_with(images, table_of(first), table_of(later)), tmp_path / "out")
    assert [row.caption for row in rows[:4]] == ["a", "B", "c", "picture number 3"]


def test_a_folder_of_files_takes_captions_from_a_table(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files", {"a.jpg": picture(0), "b.jpg": picture(0), "a.txt": "beside it"})
    table = write_table(tmp_path / "t.parquet", {"key": ["b"], "synthetic": ["new"]})
    weights = {"caption": 1, "synthetic": 1}
    rows = rows_of(open_with(files, table_of(table, by="key"), caption=weights), tmp_path / "out")
    assert [row.caption for row in rows] == ["beside it", "new"]
    table = write_table(tmp_path / "u.parquet", {"url": ["u"], "caption": ["c"]})
    with pytest.raises(UserError, match=r"source\.uri: pictures have no column url"):
        open_with(files, table_of(table, by="url"))


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_rows_outside_the_bounds_are_filtered_by_a_reason_that_names_the_column(images: Path, tmp_path: Path) -> None:
    scores = {"row": [0, 1, 2, 3, 4], "nice": [4.9, 5.0, None, float("nan"), 6.0], "spoilt": [0, 0, 0, 0, 1]}
    table = table_of(write_table(tmp_path / "t.parquet", scores))
    bounds = [Score("score:nice", "nice", minimum=5.0), Score("score:spoilt", "spoilt", maximum=0.5, keep_unknown=True)]
    rows = rows_of(open_with(images, table, scores=bounds), tmp_path / "out")
    nice, spoilt = "score:nice", "score:spoilt"
    assert [row.filtered for row in rows[:6]] == [nice, "", nice, nice, spoilt, nice]
    kept = [Score("score:nice", "nice", minimum=5.0, keep_unknown=True)]
    rows = rows_of(open_with(images, table, scores=kept), tmp_path / "out")
    assert [row.row for row in rows if row.filtered] == [0]


def test_scores_may_be_columns_of_the_images_themselves(tmp_path: Path) -> None:
    source = {"image": [b"a"] * 4, "caption": ["c"] * 4, "aesthetic": pa.array([4, 5, None, 6], pa.int8())}
    write_table(tmp_path / "source/p.parquet", source)
    bounds = [Score("score:aesthetic", "aesthetic", minimum=5.0)]
    rows = rows_of(open_with(tmp_path / "source", scores=bounds), tmp_path / "out")
    assert [row.row for row in rows if not row.filtered] == [1, 3]
    better = write_table(tmp_path / "t.parquet", {"row": [2, 3], "aesthetic": [5.5, 1.0]})
    rows = rows_of(open_with(tmp_path / "source", table_of(better), scores=bounds), tmp_path / "out")
    assert [row.row for row in rows if not row.filtered] == [1, 2], "the table's take the place of the images' own"


# --- what is refused before anything begins --------------------------------------------------------------------------


def test_a_table_that_is_not_sorted_by_row_is_refused(images: Path, tmp_path: Path) -> None:
    rows = [*range(10, 20), *range(15, 25)]
    table = write_table(tmp_path / "t.parquet", {"row": rows, "caption": ["c"] * 20})
    with pytest.raises(DatasetError, match=r"source\.tables\.0\.uri: .*: not sorted by row: 15 is within row group 0"):
        open_with(images, table_of(table))
    table = write_table(tmp_path / "twice.parquet", {"row": [3, 3], "caption": ["c"] * 2})
    with pytest.raises(DatasetError, match="row group 0 names a row twice; keep one of each"):
        rows_of(open_with(images, table_of(table)), tmp_path / "out")


def test_columns_that_are_missing_or_of_another_type_are_refused(images: Path, tmp_path: Path) -> None:
    bounds = [Score("score:nice", "nice", minimum=5.0)]
    cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"caption": ["c"]}, {}, r"tables\.0\.by: no column row in .*; it has caption"),
        ({"row": [1], "text": ["c"]}, {}, r"tables\.0\.uri: no column caption or nice in .*; it has row, text"),
        ({"row": [1.0], "nice": [1.0]}, {}, r"expected a column of whole numbers, but row in .* is of double"),
        ({"row": [1], "caption": [2]}, {}, "expected a column of text, but caption in .* is of int64"),
        ({"row": [1], "nice": ["2"]}, {}, "expected a column of numbers, but nice in .* is of string"),
        ({"key": [1], "nice": [1]}, {"by": "key"}, "expected a column of text, but key in .* is of int64"),
        ({"url": ["u"], "nice": [1]}, {"by": "url"}, r"source\.tables: no column url in .*; it has row, key"),
        ({"row": [1], "caption": ["c"]}, {}, r"filters\.nice: no column nice in"),
        ({"key": ["a", "a"], "nice": [1, 2]}, {"by": "key"}, "1 of .* rows repeat another's key"),
        ({"key": [None], "nice": [1]}, {"by": "key"}, r"tables\.0\.by: .* has no value in column key"),
        ({"row": np.array([0, 1 << 63], np.uint64), "nice": [1, 2]}, {}, "row 0 to 9223372036854775808: expected addr"),
    ]
    for number, (columns, settings, message) in enumerate(cases):
        table = write_table(tmp_path / f"{number}.parquet", columns)
        with pytest.raises(DatasetError, match=message):
            open_with(images, table_of(table, **settings), scores=bounds)
    pq.write_table(pa.table({"row": [1], "nice": [1]}), tmp_path / "bare.parquet", write_statistics=False)
    with pytest.raises(DatasetError, match="no statistics of column row"):
        open_with(images, table_of(tmp_path / "bare.parquet"), scores=bounds)


def test_a_table_that_every_worker_would_hold_has_a_limit(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "MOST_ROWS", 3)
    table = write_table(tmp_path / "t.parquet", {"key": list("abcd"), "row": range(4), "caption": ["c"] * 4})
    with pytest.raises(DatasetError, match=r"has 4 rows, but by key a table may have 3, .*; join it by row"):
        open_with(images, table_of(table, by="key"))
    assert open_with(images, table_of(table)).columns.tables[0].rows == 4


def test_an_output_keeps_its_tables_and_filters_but_they_may_move(images: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "t/t.parquet", {"row": [1, 2], "caption": ["a", "b"], "nice": [1.0, 2.0]})
    settings = [f"source.tables=[{{uri: {table.parent}}}]", "filters={nice: {min: 1}}"]

    def start(*settings: str) -> None:
        begin(prepare(config_of(images, tmp_path / "out", "builtin:tiny", *settings)), only_failed=False)

    start(*settings)
    start(*settings)
    (tmp_path / "t").rename(tmp_path / "moved")
    moved = [f"source.tables=[{{uri: {tmp_path / 'moved'}}}]", settings[1]]
    start(*moved)
    (tmp_path / "moved/t.parquet").touch()
    start(*moved)
    for other in ([moved[0], "filters={nice: {min: 2}}"], [moved[0]], [settings[1].replace("nice", "row")], []):
        with pytest.raises(DatasetError, match=r"made with another configuration \((filters|source\.tables) was"):
            start(*other)
    write_table(tmp_path / "moved/t.parquet", {"row": [1, 2], "caption": ["a", "c"], "nice": [1.0, 2.0]})
    with pytest.raises(DatasetError, match=r"source\.tables was .* and is .* now\); set it back"):
        start(*moved)
    start_again = config_of(images, tmp_path / "plain", "builtin:tiny")
    begin(prepare(start_again), only_failed=False)
    with pytest.raises(DatasetError, match=r"source\.tables was null"):
        begin(prepare(config_of(images, tmp_path / "plain", "builtin:tiny", *moved)), only_failed=False)


def test_bounds_that_bound_nothing_are_refused(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", 4, files=1)
    for wrong, message in (
        ("filters={a: {}}", r"filters\.a\.min: expected a number while max is null"),
        ("filters={a: {min: 3, max: 2}}", r"filters\.a\.min: expected at most max, which is 2"),
        ("filters={a: 3}", r"filters\.a: expected a mapping \(min, max, keep_unknown\), got 3"),
        ("filters={a: {min: x}}", r"filters\.a\.min: expected a number or null, got 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of(tmp_path / "plain", tmp_path / "out", "builtin:tiny", wrong)
