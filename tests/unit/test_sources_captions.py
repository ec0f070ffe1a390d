"""Captions of a folder of pictures in the forms that other tools write."""

import json
from pathlib import Path

import pytest

from sdp.errors import UserError
from sdp.sources.captions import gather
from tests.kit import write_files

LINES = [{"file_name": "a.jpg", "text": "one"}, {"file_name": "sub/b.png", "text": "two"}]


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"a.caption": "one\n", "sub/b.caption": "two"}, ".caption"),
        ({"metadata.jsonl": "\n".join(map(json.dumps, LINES))}, "metadata.jsonl"),
        ({"metadata.csv": 'file_name,caption\na.jpg,"one"\nsub/b.png,two\n'}, "metadata.csv"),
        ({"mine.tsv": "Caption\tFile\none\ta\ntwo\tsub/b\n"}, "mine.tsv"),
        ({"no-header.csv": "a.jpg,one\n./sub/b.png,two\n"}, "no-header.csv"),
        ({"sub/metadata.csv": "file_name,text\nb.png,two\n../a.jpg,one\n"}, "sub/metadata.csv"),
    ],
)
def test_captions_are_found_in_the_forms_of_other_tools(tmp_path: Path, files: dict[str, str], source: str) -> None:
    write_files(tmp_path, {"a.jpg": "", "sub/b.png": "", **files})
    pictures = gather(str(tmp_path))
    assert pictures is not None
    assert pictures.captions == {"a.jpg": "one", "sub/b.png": "two"}
    assert pictures.sources == {source: 2}
    assert pictures.examples == ("one", "two")
    assert not pictures.left_out


def test_a_folder_is_described_in_one_line_that_leaves_out_nothing(tmp_path: Path) -> None:
    lines = [*LINES, {"file_name": "gone.jpg", "text": "three"}, {"file_name": "c.bmp", "text": " "}]
    write_files(tmp_path, dict.fromkeys(["a.jpg", "sub/b.png", "c.bmp", "d.tiff", "e.heic", "notes"], ""))
    tables = {"metadata.jsonl": "\n".join(map(json.dumps, lines)), "prices.csv": "cents,euro\n1,2\n"}
    write_files(tmp_path, {"d.txt": "own", **tables})
    assert str(gather(str(tmp_path))) == (
        "4 pictures, captions from metadata.jsonl (2), .txt (1), without caption 1, left out by process "
        "unless --caption-with describes them; left out: .csv 1, .heic 1, notes 1; "
        "1 caption of pictures that are not there, such as gone.jpg"
    )


def test_texts_are_counted_if_they_hold_a_caption_and_read_in_any_case(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{name}.JPG": "" for name in "abc"})
    write_files(tmp_path, {"a.TXT": "upper", "b.txt": " \n", "c.txt": "lower"})
    seen = gather(str(tmp_path))
    assert seen is not None
    assert (seen.captions, seen.sources) == ({"a.JPG": "upper"}, {".TXT": 1, ".txt": 1})
    assert "without caption 1" in str(seen)
    assert not seen.left_out


def test_all_texts_that_are_not_utf_8_are_named_at_once(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{number:02d}.jpg": "" for number in range(22)})
    write_files(tmp_path, {f"{number:02d}.txt": b"caf\xe9" for number in range(22)})
    with pytest.raises(UserError) as raised:
        gather(str(tmp_path))
    lines = str(raised.value).splitlines()
    assert "19.txt: not UTF-8" in lines[19]
    assert lines[20:] == ["and 2 more"]


def test_a_text_beside_a_picture_goes_before_tables(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jpg": "", "a.txt": "own", "metadata.jsonl": json.dumps(LINES[0])})
    pictures = gather(str(tmp_path))
    assert pictures is not None
    assert (pictures.captions, pictures.sources, pictures.examples) == ({}, {".txt": 1}, ("own",))


def test_captions_may_name_the_folder_of_a_class(tmp_path: Path) -> None:
    write_files(tmp_path, {"red_cat/1.jpg": "", "dog/1.jpg": ""})
    pictures = gather(str(tmp_path), "a photo of {class}, {sitting}")
    assert pictures is not None
    assert pictures.captions == {
        "red_cat/1.jpg": "a photo of red cat, {sitting}", "dog/1.jpg": "a photo of dog, {sitting}",
    }  # fmt: skip


def test_a_caption_keeps_what_a_table_s_line_does_not_end_at_and_is_valid_text(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{name}.jpg": "" for name in "abc"})
    write_files(tmp_path, {"t.csv": "file,text\r\na,a dog\u2028on a beach\r\nb,two\x85words\x0b\x1cmore\r\n"})
    write_files(tmp_path, {"t.jsonl": '{"file": "c.jpg", "text": "cut \\ud83d"}'})
    pictures = gather(str(tmp_path))
    assert pictures is not None
    assert pictures.captions == {
        "a.jpg": "a dog\u2028on a beach", "b.jpg": "two\x85words\x0b\x1cmore", "c.jpg": "cut ?",
    }  # fmt: skip


def test_a_folder_without_pictures_is_left_to_the_job(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.tar": "", "b.parquet": ""})
    assert gather(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("metadata.jsonl", b"{}\n{", r"metadata.jsonl:2: not JSON .*; correct it"),
        ("metadata.jsonl", b"{}\n" + b"[" * 100_000, r"metadata.jsonl:2: not JSON .*; correct it"),
        ("metadata.csv", b'file,text\na,"' + b"x" * 140_000, r"metadata.csv:2: not a table .*; correct it"),
        ("metadata.csv", b"\xff", r"metadata.csv: not UTF-8 text .*; save it as UTF-8"),
        ("a\nb.jpg", b"", r"the name of 'a\\nb.jpg' has a line break; rename it"),
    ],
)
def test_a_damaged_table_or_name_is_refused(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    write_files(tmp_path, {"a.jpg": "", name: content})
    with pytest.raises(UserError, match=error):
        gather(str(tmp_path))
