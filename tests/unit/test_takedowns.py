"""Takedowns: the lists' format, their reach, and attempts to evade them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.cli import main
from sdp.datasets import blanking, repeated, tombstones
from sdp.datasets.audit import audit
from sdp.datasets.columns import table_of
from sdp.datasets.inspect import describe
from sdp.datasets.manifest import finish, open_dataset
from sdp.datasets.outcomes import FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.output import read_output
from sdp.datasets.parts import read_account, read_rows, write_part
from sdp.datasets.tombstones import Takedown, parse_list
from sdp.errors import DatasetError, UserError
from sdp.storage import Storage
from sdp.train.data.weights import row_weights
from tests.kit import (
    LAYOUT,
    begin_images,
    begin_latents,
    image_rows,
    make_images,
    make_latents,
    raising,
    write_images_part,
    write_source,
)


def url(number: int) -> Takedown:
    return Takedown("url", f"http://host/{number}")


def rows_of(storage: Storage) -> list[int]:
    return list(tombstones.load(storage).rows)


def forbid_reading_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "in_parts", raising(AssertionError("a part was read")))


# --- what a list may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "url http://host/12 # asked by mail",
        "url http://host/12\t#asked by mail",
        "url http://host/12#fragment",
        "URL  HTTP://HOST.:80/12  ",
        "\ufeffurl http://host/12\r",
    ],
)
def test_a_url_is_meant_however_it_is_written(tmp_path: Path, line: str) -> None:
    images = make_images(tmp_path)
    added = tombstones.add(images.storage, parse_list(f"{line}\n", "list.txt"))
    assert added.rows == [12]
    assert rows_of(images.storage) == [12]


def test_a_url_that_the_source_writes_in_another_way_is_found(tmp_path: Path) -> None:
    storage = begin_images(tmp_path, files=[("a.parquet", 6)]).storage
    written = ["HTTP://HOST:80/a", " http://host/b", "http://host./c#x", "http://host/d e", "http://hos\tt/f", "-"]
    table = image_rows(range(6)).set_column(1, "url", pa.array(written, pa.string()))
    (work,) = begin_images(tmp_path).pending()
    write_part(storage, "images", work, table, account_table([Outcome(r, WRITTEN) for r in range(6)]), layout=LAYOUT)
    names = ["a", "b", "c", "d%20e", "f"]
    added = tombstones.add(storage, [Takedown("url", f"http://host/{name}") for name in names])
    assert added.rows == list(range(len(names)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("url host/12", r"'url host/12' \(no scheme, http or https is needed\)"),
        ("url", r"'url' \(no URL\)"),
        ("row 5 6", "'row 5 6'"),
        ("row ٣", "'row ٣'"),
        ("sha256 abc", "'sha256 abc'"),
        ("http://host/12", "'http://host/12'"),
        ("IMG_7.JPG", "'IMG_7.JPG'"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number_and_the_fault(line: str, message: str) -> None:
    expected = "list.txt:3: expected `row NUMBER`, `url URL`, `sha256 HEX` or `file NAME`, got "
    with pytest.raises(UserError, match=f"{expected}{message}; correct the line"):
        parse_list(f"# a list\n\n{line}\nrow 1\n", "list.txt")
    assert parse_list("row 007 # wrong picture\n#row 8\n", "list.txt") == [Takedown("row", "7")]


# --- whom it reaches -------------------------------------------------------------------------------------------------


def test_a_takedown_applies_to_rows_that_a_running_download_has_yet_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = begin_images(tmp_path)
    first, *later = output.pending()
    write_images_part(output.storage, first)
    wanted = [url(36), Takedown("sha256", f"{29:064x}"), url(4)]
    added = tombstones.add(output.storage, wanted)
    assert added.rows == [4]
    assert added.unmatched == [Takedown("sha256", f"{29:064x}"), url(36)]
    for work in later:  # by a job that began before the list was there
        write_images_part(output.storage, work)
    images = finish(output)
    latents = make_latents(tmp_path)
    assert rows_of(latents.storage) == [4, 29, 36]
    assert row_weights(latents.storage, 0.0, None)(np.array([28, 29, 36])).tolist() == [1.0, 0.0, 0.0]

    assert tombstones.settle(images.storage) == 2
    forbid_reading_parts(monkeypatch)
    assert rows_of(latents.storage) == [4, 29, 36]
    assert tombstones.settle(images.storage) == 0
    repeat = tombstones.add(images.storage, [url(36)])
    assert (repeat.recorded, repeat.known, repeat.rows, repeat.unmatched) == ([], 1, [36], [])


def test_a_list_whose_looking_up_was_cut_short_holds_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make_images(tmp_path)

    with monkeypatch.context() as patched:
        forbid_reading_parts(patched)
        with pytest.raises(AssertionError, match="a part was read"):
            tombstones.add(images.storage, [url(12)])
    assert rows_of(images.storage) == [12]


def test_a_source_that_grows_brings_nothing_back(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    assert tombstones.add(images.storage, [url(46), url(12)]).rows == [12]
    write_source(tmp_path / "source", [("c.parquet", 11)], first=42)
    make_images(tmp_path)
    assert rows_of(images.storage) == [12, 46]


def test_damaged_lookups_are_made_again(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    tombstones.add(images.storage, [url(12)])
    tombstones.add(images.storage, [url(13)])
    for file in (tmp_path / "images/_tombstones/looked").iterdir():
        file.write_bytes(b"damaged")
    assert rows_of(images.storage) == [12, 13]


def test_a_list_that_is_deleted_holds_no_more_and_one_in_its_place_is_looked_up(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    for row in (12, 13):
        tombstones.add(images.storage, [url(row)])
    (tmp_path / "images/_tombstones/000000.pq").unlink()
    assert rows_of(images.storage) == [13]
    (tmp_path / "images/_tombstones/000001.pq").unlink()
    added = tombstones.add(images.storage, [url(12), Takedown("row", "99999"), Takedown("row", "41")])
    assert (added.rows, added.unmatched) == ([12, 41], [Takedown("row", "99999")])


def test_a_damaged_list_is_an_error_and_foreign_files_are_ignored(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    tombstones.add(images.storage, [url(12)])
    images.storage.publish("_tombstones/notes.txt", b"not ours")
    images.storage.publish("_tombstones/.DS_Store", b"\0\0")
    assert rows_of(images.storage) == [12]
    described = describe(images.storage)
    assert described.complete
    (tmp_path / "images/_tombstones/000000.pq").write_bytes(b"PAR1 and no more")
    with pytest.raises(DatasetError, match=r"000000\.pq: corrupt takedown list .*add its takedowns again"):
        tombstones.load(images.storage)
    described = describe(images.storage)
    assert described.counts.input == 42
    assert any("corrupt takedown list" in problem for problem in described.problems)


@pytest.mark.parametrize(
    "entry", [(None, "x", 1), ("url", None, 1), ("row", "7", None), ("row", "7", -7), ("key", "x", 1)]
)
def test_a_list_with_an_entry_that_is_no_takedown_is_refused_and_the_entry_named(
    tmp_path: Path, entry: tuple[str | None, str | None, int | None]
) -> None:
    images = make_images(tmp_path)
    tombstones.add(images.storage, [url(12)])
    pq.write_table(table_of([("row", "3", 3), entry], tombstones.SCHEMA), tmp_path / "images/_tombstones/000000.pq")
    named = " ".join(map(str, entry))
    with pytest.raises(DatasetError, match=f"corrupt takedown list .{named}.*is not a takedown"):
        tombstones.load(images.storage)


def test_a_list_of_the_first_form_with_its_rows_in_it_is_understood(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    entries = [("url", "HTTP://host/12#x", 12), ("row", "4", 4), ("url", "http://host:80/12", None)]
    (tmp_path / "images/_tombstones").mkdir()
    pq.write_table(table_of(entries, tombstones.SCHEMA), tmp_path / "images/_tombstones/000000.pq")
    held = tombstones.load(images.storage)
    assert list(held.rows) == [4, 12]
    assert held.values("url") == {"http://host/12"}
    assert len(held) == 2, "two spellings of one address are one takedown"


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_reports_the_recorded_rows_and_their_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path).storage.uri
    list_file = tmp_path / "list.txt"
    list_file.write_text("url http://HOST/12 # asked by mail\nrow 4\nrow 99999\n")
    assert main(["audit", images, "--takedown", str(list_file)]) == 0
    output = capsys.readouterr().err
    assert "3 takedowns recorded, 0 already listed\n" in output
    assert "they match 2 addresses here" in output
    assert "a run leaves them out from its next epoch on; --rewrite also" in output
    assert "not in this dataset, and left out if it is added: row 99999" in output
    assert main(["audit", images, "--takedown", str(list_file)]) == 0
    assert "0 takedowns recorded, 3 already listed\n" in capsys.readouterr().err
    list_file.write_text("# nothing yet\n")
    assert main(["audit", images, "--takedown", str(list_file)]) == 2
    assert "lists nothing" in capsys.readouterr().err
    assert main(["audit", images, "--url", ""]) == 2
    assert "`sha256 HEX` or `file NAME`, got 'url' (no URL)" in capsys.readouterr().err
    list_file.write_text("row 4\nfile a.jpg\n")
    assert main(["audit", images, "--takedown", str(list_file)]) == 2
    assert f"{list_file}:2: {images}: its rows are of tables" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run/_run.json").write_text('{"datasets": ["../images"]}')
    assert main(["audit", str(tmp_path / "run"), "--takedown", str(list_file)]) == 2
    assert f"run is a run; name the dataset that it trains on: {images}" in capsys.readouterr().err


# --- audit -----------------------------------------------------------------------------------------------------------


def test_an_audit_by_url_accepts_any_form_and_finds_written_rows(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage
    (trace,) = audit([images.uri], value=Takedown("url", "HTTP://HOST:80/12#x"))
    assert (trace.row, trace.datasets[0]["outcome"], trace.notes) == (12, WRITTEN, [])
    tombstones.add(images, [url(12), url(10)])
    (trace,) = audit([images.uri], value=url(12))
    assert (trace.taken_down, trace.datasets[0]["outcome"]) == (True, "taken_down")
    with pytest.raises(DatasetError, match=r"no written row with url http://host/10 in .*; it is listed as taken down"):
        audit([images.uri], value=url(10))


def test_audit_by_hash_knows_content_that_was_refused(tmp_path: Path) -> None:
    digest = "ab" * 32
    output = begin_images(tmp_path)
    for work in output.pending():

        def fate(row: int) -> Outcome:
            return Outcome(row, FILTERED, "blocked_content", digest) if row == 8 else Outcome(row, WRITTEN)

        write_images_part(output.storage, work, fate)
    finish(output)
    (trace,) = audit([output.storage.uri], value=Takedown("sha256", digest.upper()))
    assert (trace.row, trace.datasets[0]["reason"]) == (8, "blocked_content")


# --- parts without the content of rows that are taken down -----------------------------------------------------------


def rewrite(storage: Storage, tmp_path: Path, *lines: str) -> None:
    (tmp_path / "list.txt").write_text("\n".join(lines))
    assert main(["audit", storage.uri, "--takedown", str(tmp_path / "list.txt"), "--rewrite"]) == 0


def test_rewritten_parts_hold_no_content_of_taken_down_rows_and_the_same_account(tmp_path: Path) -> None:
    images, file = make_images(tmp_path).storage, tmp_path / "images/parts/000000001.parquet"
    before, account = read_rows(images, "parts/000000001.parquet"), read_account(images, "parts/000000001.parquet")
    assert b"image 12" in file.read_bytes()
    rewrite(images, tmp_path, "url http://host/12")
    assert b"image 12" not in file.read_bytes()
    after = read_rows(images, "parts/000000001.parquet")
    for row, now in zip(before.to_pylist(), after.to_pylist(), strict=True):
        assert now == (row | {"image": bytes(8)} if row["row"] == 12 else row)
    assert read_account(images, "parts/000000001.parquet").equals(account)
    described = describe(images, verify=True)
    assert described.complete
    assert open_dataset(images).manifest.version == 2
    assert described.counts == open_dataset(images, version=1).manifest.counts
    rewrite(images, tmp_path, "url http://host/12")
    assert open_dataset(images).manifest.version == 2, "nothing was left to do"
    (tmp_path / "images/_tombstones/000000.pq").unlink()
    assert rows_of(images) == [12], "a blank row stays out even if its list is withdrawn"


def test_datasets_made_from_a_rewritten_one_go_on_and_can_be_rewritten_too(tmp_path: Path) -> None:
    images, latents = make_images(tmp_path).storage, make_latents(tmp_path).storage
    rewrite(images, tmp_path, "url http://host/12")
    rewrite(images, tmp_path, "url http://host/13")
    index = begin_latents(tmp_path).index
    assert len(index.versions) == 1, "no part is new"
    rewrite(latents, tmp_path, "row 14")
    cells = {row["row"]: row["latents"] for row in read_rows(latents, "parts/000000000.parquet").to_pylist()}
    assert {row for row, cell in cells.items() if cell == bytes(8)} == {12, 13, 14}
    assert describe(latents, verify=True).complete
    (tmp_path / "images/parts/000000001.parquet").write_bytes(b"another file")
    with pytest.raises(DatasetError, match="corrupt part"):
        begin_latents(tmp_path)


def test_a_rewrite_that_ended_before_its_manifest_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make_images(tmp_path).storage
    with monkeypatch.context() as patch:
        patch.setattr(blanking, "finish", lambda *_, **__: None)
        rewrite(images, tmp_path, "url http://host/12")
    assert not describe(images).complete
    rewrite(images, tmp_path, "url http://host/12")
    assert describe(images).complete


def test_repeats_are_still_left_out_after_a_rewrite(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage

    def find(_: object, digest: str) -> int:
        return repeated.keep(images, digest, [np.array([13])], lambda: None)

    finish(read_output(images), input={"uri": "src"}, find_repeated=find)
    rewrite(images, tmp_path, "url http://host/12")
    dataset = open_dataset(images)
    assert (dataset.manifest.version, dataset.manifest.repeated) == (3, 1)
    assert dataset.repeated_rows is not None
    assert 13 in dataset.repeated_rows
