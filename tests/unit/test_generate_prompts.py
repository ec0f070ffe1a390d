"""Reading prompts, and the addresses that they keep."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config import parse
from sdp.config.generate import GenerateConfig
from sdp.datasets import tombstones
from sdp.datasets.columns import LARGEST_CELL
from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.parts import Layout, write_part
from sdp.datasets.tombstones import Takedown
from sdp.errors import SdpError, UserError
from sdp.generate.prompts import Prompt, freeze, frozen_prompts, read_prompts
from sdp.storage import open_storage
from tests.growth.forged import repeat_text
from tests.kit import begin_images, line_of


def config(**more: object) -> GenerateConfig:
    return parse("generate", {"output": {"uri": "out"}, "checkpoint": "builtin:tiny", **more})


def of_file(uri: Path | str, column: str = "caption", **more: object) -> GenerateConfig:
    return config(source={"uri": str(uri), "caption_column": column}, **more)


def refusal(config: GenerateConfig) -> str:
    return line_of(lambda: read_prompts(config))


def test_a_text_file_has_one_prompt_per_line_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes("\ufeffa red circle\r\n\r\n  a\u2028b\x0bc\u0085d, große Öse \r\n\n".encode())
    assert read_prompts(of_file(file)).texts == ["a red circle", "a\u2028b\x0bc\u0085d, große Öse"]
    assert read_prompts(of_file(file, limit=1)).texts == ["a red circle"]


def test_a_parquet_file_has_a_prompt_a_row_and_a_missing_caption_keeps_its_place(tmp_path: Path) -> None:
    pq.write_table(pa.table({"TEXT": ["a", None, "  ", "d "]}), tmp_path / "p.parquet")
    assert read_prompts(of_file(tmp_path / "p.parquet", "TEXT")).texts == ["a", None, None, "d"]


def test_prompts_of_a_stranger_s_parquet_are_cut_and_its_lies_refused(tmp_path: Path) -> None:
    file = repeat_text(tmp_path / "p.parquet", ["a", "é" * 50_000], caption=[0, 1, 1, None])
    short = "é" * (LARGEST_CELL // 2) + "\ufffd"
    assert read_prompts(of_file(file)).texts == ["a", short, short, None]
    repeat_text(file, ["x" * 20_000_000], caption=[0] * 20)
    tracemalloc.start()
    assert len(read_prompts(of_file(file)).texts) == 20
    assert tracemalloc.get_traced_memory()[1] < 20_000_000, "not each row's text whole"
    tracemalloc.stop()


def test_files_of_a_folder_follow_one_another_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": ["c", "d"]}), tmp_path / "2.parquet")
    (tmp_path / "1.txt").write_text("a\nb")
    assert read_prompts(of_file(tmp_path)).texts == ["a", "b", "c", "d"]


def test_prompts_may_stand_in_the_configuration() -> None:
    assert read_prompts(config(prompts=["a", " b "])).texts == ["a", "b"]
    assert read_prompts(config(prompts=["a", "b"], limit=1)).texts == ["a"]


def test_files_without_a_prompt_are_refused_in_a_line(tmp_path: Path) -> None:
    empty, latin, table = tmp_path / "empty.txt", tmp_path / "latin.txt", tmp_path / "t.parquet"
    empty.write_text(" \n\n")
    latin.write_bytes("fine\nstra\xdfe\n".encode("latin-1"))
    pq.write_table(pa.table({"url": ["x"], "number": [1]}), table)
    assert refusal(of_file(empty)) == (
        f"source.uri: {empty}: no prompts; expected one per line, or Parquet with a caption column"
    )
    assert f"{latin}: line 2 is not UTF-8 text" in refusal(of_file(latin))
    assert refusal(of_file(table)) == f"source.caption_column: {table}: no column caption; it has url, number"
    assert "expected text in number, got int64" in refusal(of_file(table, "number"))
    table.write_bytes(table.read_bytes()[:-20])
    assert f"{table}: not a readable Parquet file" in refusal(of_file(table, "url"))
    assert "no such file" in refusal(of_file(tmp_path / "none.txt"))


def begin(folder: Path) -> Output:
    return open_output(open_storage(str(folder)), Head("samples", 4, False, {}))


def put(folder: Path, prompts: list[Prompt], per_prompt: int = 3, **more: object) -> Output:
    return freeze(begin(folder), prompts, config(prompts=["-"], images_per_prompt=per_prompt, **more))


def units(output: Output) -> list[tuple[int, int]]:
    return [(work.unit.start, work.unit.stop) for work in output.index.works()]


def test_each_picture_has_an_address_and_more_prompts_get_the_next_ones(tmp_path: Path) -> None:
    before = put(tmp_path, ["a", None, "c"])
    assert units(before) == [(0, 4), (4, 8), (8, 9)]
    assert put(tmp_path, ["a", None, "c"]).index.versions[0].extent == before.index.versions[0].extent
    after = put(tmp_path, ["a", None, "c", "d"])
    assert units(after) == [(0, 4), (4, 8), (8, 9), (9, 12)]
    assert frozen_prompts(after.storage, after.index) == ["a", None, "c", "d"]


def test_a_dry_run_plans_the_same_and_writes_nothing(tmp_path: Path) -> None:
    output = replace(begin(tmp_path), writes=False)
    names = output.storage.names()
    planned = freeze(output, ["a", "b"], config(prompts=["-"], images_per_prompt=3))
    assert units(planned) == [(0, 4), (4, 6)]
    assert output.storage.names() == names


def test_a_prompt_that_changed_or_went_away_is_refused(tmp_path: Path) -> None:
    put(tmp_path, ["a", "b", "c"])
    with pytest.raises(UserError, match=r"^prompt 1: was 'b' when this output began, is 'x' now; .*"):
        put(tmp_path, ["a", "x", "c"])
    with pytest.raises(UserError, match=r"^prompt 2: was 'c' when this output began, is missing now; .*"):
        put(tmp_path, ["a", "b"])
    assert units(put(tmp_path, ["a", "b"], limit=2)) == [(0, 4), (4, 8), (8, 9)]


def test_prompts_that_were_frozen_and_then_edited_are_refused(tmp_path: Path) -> None:
    output = put(tmp_path, ["a"])
    (file,) = (tmp_path / "_prompts").iterdir()
    pq.write_table(pa.table({"prompt": ["b"]}), file)
    with pytest.raises(UserError, match=rf"{file.name}: has changed"):
        frozen_prompts(output.storage, output.index)


def images_with_captions(root: Path) -> Path:
    """A dataset in which row n has the caption n, in parts of ten; row 3 has none, and row 12 was not written."""
    output = begin_images(root, files=[("a.parquet", 25)])
    for work in output.pending():
        rows = [row for row in range(work.unit.start, work.unit.stop) if row != 12]
        account = [Outcome(row, WRITTEN) for row in rows]
        if work.unit.start == 10:
            account.append(Outcome(12, "failed", "dns"))
        captions = [None if row == 3 else f"caption {row}" for row in rows]
        table = pa.table({"row": pa.array(rows, pa.int64()), "caption": pa.array(captions, pa.string())})
        write_part(output.storage, "images", work, table, account_table(account), layout=Layout())
    return root / "images"


def test_captions_of_images_that_are_taken_down_keep_their_places_and_are_named(tmp_path: Path) -> None:
    images = images_with_captions(tmp_path)
    before = read_prompts(of_file(images)).texts
    assert read_prompts(of_file(images)).taken_down == frozenset()
    takedowns = [Takedown("row", row) for row in ("1", "12", "13", "24")]
    tombstones.add(open_storage(str(images)), takedowns)
    assert read_prompts(of_file(images)).texts == before
    gone = read_prompts(of_file(images)).taken_down
    assert {before[number] for number in gone} == {"caption 1", "caption 13", "caption 24"}
    assert gone == {1, 12, 23}, "row 12 has no caption here, so those after it come one place earlier"
    assert read_prompts(of_file(images, limit=13)).taken_down == {1, 12}
    assert read_prompts(of_file(images / "parts" / "000000001.parquet")).taken_down == {2}
    assert read_prompts(of_file(images / "parts" / "*1.parquet")).taken_down == {2}


def test_takedowns_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    images = images_with_captions(tmp_path)
    open_storage(str(images)).publish("_tombstones/000000.pq", b"damaged")
    with pytest.raises(SdpError, match="corrupt takedown list"):
        read_prompts(of_file(images))
