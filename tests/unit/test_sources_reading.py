"""Pieces cover a unit's rows exactly once, and reading one gives the rows with their addresses."""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets import columns
from sdp.datasets.manifest import Dataset, finish, open_dataset
from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, Output, open_output, read_output
from sdp.datasets.parts import Layout, write_part
from sdp.datasets.source import freeze_files, freeze_source, freeze_upstream, order_retry
from sdp.errors import DatasetError
from sdp.sources import groups, reading
from sdp.sources.groups import RowGroup
from sdp.sources.pieces import Piece, Planner
from sdp.sources.reading import Columns, addresses, read_piece
from sdp.storage import list_source, open_storage
from tests.kit import write_files
from tests.process_kit import every_tenth, images_table, make_images, picture, write_plain


def over_images(root: Path, unit_rows: int = 35, **made: int) -> tuple[Output, Dataset]:
    make_images(root, **made)
    upstream = open_dataset(open_storage(str(root / "images")), "images")
    output = open_output(open_storage(str(root / "out")), Head("latents", unit_rows, True, {}))
    return freeze_upstream(output, upstream), upstream


def over_plain(root: Path, unit_rows: int = 20) -> Output:
    output = open_output(open_storage(str(root / "out")), Head("latents", unit_rows, False, {}))
    return freeze_source(output, list_source(str(root / "plain")), ["image", "caption"])


def all_rows(output: Output, planner: Planner) -> list[list[int]]:
    """The addresses of each unit, as its pieces give them."""
    return [[row.row for piece in planner(work) for row in read_piece(piece, Columns())] for work in output.pending()]


@pytest.mark.parametrize("piece_rows", [1, 7, 16, 1000])
def test_an_images_dataset_is_read_once_without_missing_rows(tmp_path: Path, piece_rows: int) -> None:
    output, upstream = over_images(tmp_path, rows=100)
    units = all_rows(output, Planner(output.index, upstream, piece_rows))
    expected = [row for row in range(100) if not every_tenth(row)]
    assert [row for unit in units for row in unit] == expected
    assert [len(unit) for unit in units] == [len([r for r in expected if a <= r < a + 35]) for a in (0, 35, 70)]


@pytest.mark.parametrize("piece_rows", [1, 7, 16, 1000])
def test_a_plain_source_is_read_once_each_row_with_its_position_as_address(tmp_path: Path, piece_rows: int) -> None:
    write_plain(tmp_path / "plain", 50, files=3, group=8)
    output = over_plain(tmp_path)
    units = all_rows(output, Planner(output.index, None, piece_rows))
    assert units == [list(range(20)), list(range(20, 40)), list(range(40, 50))]


def test_large_row_groups_are_shared_by_several_pieces(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", 40, files=1, group=40)
    output = over_plain(tmp_path, unit_rows=40)
    (work,) = output.pending()
    pieces = Planner(output.index, None, 12)(work)
    assert [(piece.skip, piece.take) for piece in pieces] == [(0, 10), (10, 10), (20, 10), (30, 10)]
    assert all(group.rows == 40 for piece in pieces for group in piece.groups)


def test_units_that_share_a_row_group_read_it_once_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain(tmp_path / "plain", 40, files=1, group=40)
    output, opened, real = over_plain(tmp_path, unit_rows=20), list[object](), groups.open_parquet
    monkeypatch.setattr(groups, "open_parquet", lambda *of, **how: opened.append(of) or real(*of, **how))
    planner = Planner(output.index, None, 12)
    pieces = [(piece.skip, piece.take) for work in output.pending() for piece in planner(work)]
    assert pieces == [(0, 10), (10, 10), (20, 10), (30, 10)]
    assert all_rows(output, planner) == [list(range(20)), list(range(20, 40))]
    assert len(opened) == 1
    (last, _) = planner(output.pending()[1])
    assert [row.row for row in read_piece(last, Columns())] == list(range(20, 30)), "again, after the end"


def test_two_threads_read_a_row_group_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plain(tmp_path / "plain", 80, files=1, group=80)
    output, opened, real = over_plain(tmp_path, unit_rows=80), list[object](), groups.open_parquet
    monkeypatch.setattr(groups, "open_parquet", lambda *of, **how: opened.append(of) or real(*of, **how))
    pieces = Planner(output.index, None, 10)(output.pending()[0])
    # As two threads do, in turns.
    pairs = zip(*(map(partial(read_piece, columns=Columns()), pieces[start::2]) for start in (0, 1)), strict=True)
    rows = [row.row for pair in pairs for both in zip(*pair, strict=True) for row in both]
    assert sorted(rows) == list(range(80))
    assert len(opened) == 2


def test_readers_of_one_row_group_are_kept_and_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "usable_cores", lambda: 3)
    write_plain(tmp_path / "plain", 160, files=1, group=80)
    output = over_plain(tmp_path, unit_rows=160)
    first, *pieces = Planner(output.index, None, 10)(output.pending()[0])
    kept = []
    for piece in (*reversed(pieces[7:]), first):  # backwards through the second group, so that none can go on
        assert len(list(read_piece(piece, Columns()))) == 10
        kept.append(len(groups._unfinished))
    assert max(kept) == 3
    assert kept[-1] == 1, "those of another group are gone"


def test_a_rows_image_key_and_caption_come_with_it(tmp_path: Path) -> None:
    output, upstream = over_images(tmp_path, rows=20)
    (work,) = output.pending()
    rows = [row for piece in Planner(output.index, upstream, 100)(work) for row in read_piece(piece, Columns())]
    for row in rows:
        assert (row.key, row.caption) == (f"k{row.row}", f"picture number {row.row}")
        assert row.image is not None
        assert bytes(row.image) == picture(row.row)


def test_columns_of_other_names_and_the_hubs_structs_are_read(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = pa.array([{"bytes": picture(0), "path": "a.jpg"}, None, {"path": "b.jpg"}], kind)
    pq.write_table(pa.table({"img": structs, "TEXT": ["a", None, "c"]}), tmp_path / "a.parquet")
    output = open_output(open_storage(str(tmp_path / "out")), Head("latents", 10, False, {}))
    output = freeze_source(output, list_source(str(tmp_path / "a.parquet")), ["img", "TEXT"])
    (piece,) = Planner(output.index, None, 10)(output.pending()[0])
    first, second, third = read_piece(piece, Columns("img", "TEXT"))
    assert first.image is not None
    assert bytes(first.image) == picture(0)
    assert (second.image, second.caption) == (None, None)
    assert (third.image, third.caption) == (None, "c")


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_captions_in_bytes_are_decoded_and_other_values_are_none(tmp_path: Path, kind: pa.DataType) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    captions = pa.array([b"a cat", "ein Kätzchen".encode(), b"\xff\xfe cat", None], pa.binary())
    images = pa.array([picture(row) for row in range(4)], pa.binary())
    # Declared as text without validation, as other writers do.
    pq.write_table(pa.table({"image": images, "caption": captions.cast(kind, safe=False)}), folder / "a.parquet")
    output = over_plain(tmp_path)
    (piece,) = Planner(output.index, None, 10)(output.pending()[0])
    assert [row.caption for row in read_piece(piece, Columns())] == ["a cat", "ein Kätzchen", None, None]


def test_only_the_rows_asked_for_are_given_and_addresses_without_images(tmp_path: Path) -> None:
    output, upstream = over_images(tmp_path, rows=30)
    (work,) = output.pending()
    (piece,) = Planner(output.index, upstream, 1000)(work)
    asked = np.array([3, 7, 12], np.int64)
    assert [row.row for row in read_piece(piece, Columns(), only=asked)] == [3, 12]
    assert addresses(piece).tolist() == [row for row in range(30) if not every_tenth(row)]
    assert [addresses(part).tolist() for part in piece.cut(27)] == [[r] for r in range(30) if not every_tenth(r)]


@pytest.mark.parametrize("kind", ["Parquet", "pictures"])
def test_no_more_is_read_ahead_than_memory_should_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder, read = tmp_path / "plain", list[str]()
    if kind == "Parquet":
        write_plain(folder, 20, group=20)
        output = over_plain(tmp_path)
        monkeypatch.setattr(columns, "_BATCH_BYTES", 1)
    else:
        write_files(folder, {f"{number:02}.png": picture(number) for number in range(20)})
        output = open_output(open_storage(str(tmp_path / "out")), Head("latents", 20, False, {}))
        output = freeze_files(output, list_source(str(folder), suffixes=(".png",)))
        monkeypatch.setattr(reading, "_AHEAD_BYTES", 0)
    module, name = (groups, "cut") if kind == "Parquet" else (reading, "_picture")
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *of: read.append(name) or original(*of))
    (work,) = output.pending()
    (piece,) = Planner(output.index, None, 1000)(work)
    rows = read_piece(piece, Columns())
    assert next(rows).row == 0
    assert len(read) == 1
    assert [row.row for row in rows] == list(range(1, 20))


def test_a_cut_piece_is_the_same_rows() -> None:
    group = RowGroup("f", 0, 100, 0)
    piece = Piece(work=None, order=0, groups=(group,), skip=10, take=23)  # type: ignore[arg-type]
    for count in (1, 2, 5, 23, 50):
        parts = piece.cut(count)
        assert [row for p in parts for row in range(p.skip, p.skip + p.take)] == list(range(10, 33))
    assert len(piece.cut(5)) == 5


def test_rows_rescued_by_upstreams_retries_are_read_with_their_unit(tmp_path: Path) -> None:
    output, upstream = over_images(tmp_path, rows=40, unit_rows=40)
    for work in output.pending():  # its part appears, as if encoded
        output.storage.create(work.name, b"")
    images = order_retry(read_output(upstream.storage), upstream)
    for work in images.pending():
        rescued = [row for row in range(work.unit.start, work.unit.stop) if every_tenth(row)]
        account = account_table([Outcome(row, WRITTEN) for row in rescued])
        retried = {"http_status": len(rescued)}
        write_part(upstream.storage, "images", work, images_table(rescued), account, layout=Layout(), retried=retried)
    upstream = finish(images)
    output = freeze_upstream(output, upstream)
    (work,) = output.pending()
    assert work.attempt == 1
    rows = [row.row for piece in Planner(output.index, upstream, 5)(work) for row in read_piece(piece, Columns())]
    assert rows == [7, 17, 27, 37]


def test_a_damaged_source_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", 10, files=1)
    output = over_plain(tmp_path)
    (file,) = (tmp_path / "plain").iterdir()
    (piece,) = Planner(output.index, None, 10)(output.pending()[0])
    file.write_bytes(file.read_bytes()[:200])
    groups.footer_of.cache_clear()
    with pytest.raises(DatasetError, match=rf"{file.name}: not a readable Parquet file"):
        list(read_piece(piece, Columns()))
