"""Finding the files of a source on a local disk, and what patterns mean."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.errors import NotFound, UserError
from sdp.storage import list_source, open_source
from sdp.storage.opening import split_pattern, translate
from tests.kit import write_files


@pytest.fixture
def top(tmp_path: Path) -> Path:
    whole = ["a.parquet", "b.parquet", "readme.txt", "deep/er/c.parquet", "deep/[1].parquet"]
    hidden = ["_temporary/x.parquet", ".hidden.parquet", "_SUCCESS"]
    return write_files(tmp_path, dict.fromkeys([*whole, *hidden], "12345"))


@pytest.mark.parametrize(
    ("uri", "names"),
    [
        ("{top}", ["a.parquet", "b.parquet", "deep/[1].parquet", "deep/er/c.parquet"]),
        ("{top}/", ["a.parquet", "b.parquet", "deep/[1].parquet", "deep/er/c.parquet"]),
        ("file://{top}/deep/er", ["deep/er/c.parquet"]),
        ("{top}/b.parquet", ["b.parquet"]),
        ("{top}/readme.txt", ["readme.txt"]),
        ("{top}/_temporary/x.parquet", ["_temporary/x.parquet"]),
        ("{top}/*.parquet", [".hidden.parquet", "a.parquet", "b.parquet"]),
        ("{top}/deep/[1].par*", ["deep/[1].parquet"]),
        ("{top}/?.*", ["a.parquet", "b.parquet"]),
        ("{top}/deep/**/*.parquet", ["deep/[1].parquet", "deep/er/c.parquet"]),
        ("{top}/d*/er/*", ["deep/er/c.parquet"]),
        ("{top}/deep/[1].parquet", ["deep/[1].parquet"]),
    ],
)
def test_files_folders_and_patterns(top: Path, uri: str, names: list[str]) -> None:
    files = list_source(uri.format(top=top))
    assert [(file.uri, file.size) for file in files] == [(f"{top}/{name}", 5) for name in names]


@pytest.mark.parametrize("uri", ["{top}/no.parquet", "{top}/no", "{top}/*.csv", "{top}/no/*", "{top}/_temporary/deep"])
def test_a_uri_that_means_nothing_is_not_found(top: Path, uri: str) -> None:
    with pytest.raises(NotFound) as caught:
        list_source(uri.format(top=top))
    assert str(caught.value).startswith(uri.format(top=top))


def test_a_file_whose_name_is_not_utf_8_is_refused(top: Path) -> None:
    Path(os.fsdecode(os.fsencode(top) + b"/\xff.parquet")).write_bytes(b"12345")
    with pytest.raises(UserError, match=r"/\?\.parquet: the file's name is not UTF-8; rename it"):
        list_source(str(top))


def test_an_etag_changes_with_the_content_and_survives_a_move(top: Path) -> None:
    before = list_source(f"{top}/a.parquet")[0]
    (top / "a.parquet").rename(top / "moved.parquet")
    assert list_source(f"{top}/moved.parquet")[0].etag == before.etag
    (top / "a.parquet").write_bytes(b"54321")
    assert list_source(f"{top}/a.parquet")[0].etag != before.etag


def test_a_file_of_a_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"url": ["a", "b"]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert pq.read_table(open_source(f"file://{tmp_path}/t.parquet")).equals(table)
    monkeypatch.chdir(tmp_path)
    assert pq.read_table(open_source("t.parquet")).equals(table)
    with pytest.raises(NotFound, match="no such file"):
        open_source("other.parquet")
    with pytest.raises(UserError, match="names a folder"):
        open_source("s3://bucket")


@pytest.mark.parametrize(
    ("uri", "split"),
    [
        ("s3://b/x/*.parquet", ("s3://b/x", "*.parquet")),
        ("s3://b/x/part-?/y?", ("s3://b/x", "part-?/y?")),
        ("s3://b/x", ("s3://b/x", "")),
        ("/*.parquet", ("/", "*.parquet")),
        ("*.parquet", (".", "*.parquet")),
        ("hf://datasets/o/n@main/**", ("hf://datasets/o/n@main", "**")),
    ],
)
def test_a_pattern_is_split_from_its_folder(uri: str, split: tuple[str, str]) -> None:
    assert split_pattern(uri) == split


def test_a_bucket_cannot_be_guessed() -> None:
    with pytest.raises(UserError, match="a bucket cannot be a wildcard"):
        split_pattern("s3://buck*/x")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*", ["a", "a.b"], ["a/b", "/"]),
        ("**", ["a", "a/b/c"], []),
        ("**/x", ["x", "a/x", "a/b/x"], ["ax", "x/a"]),
        ("a/**/x", ["a/x", "a/b/x"], ["ax", "a/bx"]),
        ("a?c", ["abc"], ["ac", "a/c", "abbc"]),
        ("a.b+(c)[d]", ["a.b+(c)[d]"], ["aXb+(c)[d]", "a.b+(c)d"]),
    ],
)
def test_a_pattern_matches_these_names(pattern: str, yes: list[str], no: list[str]) -> None:
    match = translate(pattern)
    assert [name for name in yes if not match.fullmatch(name)] == []
    assert [name for name in no if match.fullmatch(name)] == []
