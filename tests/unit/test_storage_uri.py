"""The meaning of URIs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.errors import UserError
from sdp.storage import open_storage
from sdp.storage.base import checked
from sdp.storage.uri import is_read_only, join, parse, shown


@pytest.mark.parametrize(
    ("uri", "normal"),
    [
        ("/data/x/", "/data/x"),
        ("/data/./a/../x", "/data/x"),
        ("/", "/"),
        ("/data/100%#=?/ü", "/data/100%#=?/ü"),
        ("file:///data/x/", "/data/x"),
        ("file://localhost/data", "/data"),
        ("file:///data/a%20b%25", "/data/a b%"),
        ("file:///data/a#b?c", "/data/a#b?c"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a b/c%20d#e=f/", "s3://bucket/a b/c%20d#e=f"),
        ("S3://bucket/x", "s3://bucket/x"),
        ("gs://bucket/x/y", "gs://bucket/x/y"),
    ],
)
def test_a_uri_has_one_normal_form(uri: str, normal: str) -> None:
    assert parse(uri).uri == normal
    assert open_storage(uri).uri == normal
    assert open_storage(normal) == open_storage(uri)


def test_a_relative_path_is_made_absolute_where_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("out/images").uri == str(tmp_path / "out" / "images")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_storage("~/out").uri == "/home/somebody/out"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("s3a://bucket/x", "unknown scheme 's3a'"),
        ("", "empty"),
        ("s3:/bucket/x", "expected two slashes; write s3://bucket/x"),
        ("S3:bucket", "expected two slashes; write S3://bucket"),
        ("s3://", "no bucket"),
        ("s3:///x", "no bucket"),
        ("s3://bucket/a//b", "segments"),
        ("s3://bucket/../b", "segments"),
        ("file://server/share", "this machine"),
        ("s3://bucket/a\nb", "control character"),
        ("https://host/x", "can only be read"),
        ("hf://datasets/o/n", "can only be read"),
        ("https://[x", "https://…: the address cannot be read"),
        ("http://user:word@[::1/x?sig=secret", "http://…: the address cannot be read"),
    ],
)
def test_an_invalid_storage_is_reported_in_one_line(uri: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        open_storage(uri)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("uri", "only"),
    [("https://h/f", True), ("HTTP://h/f", True), ("hf://datasets/o/n/f", True), ("s3://b/f", False), ("f", False)],
)
def test_a_read_only_source_is_known_by_its_scheme(uri: str, only: bool) -> None:
    assert is_read_only(uri) is only


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("s3://b", "x", "y"), "s3://b/x/y"),
        (("s3://b/x/", "/y/", "z.parquet"), "s3://b/x/y/z.parquet"),
        (("/", "x"), "/x"),
        (("/a", ""), "/a"),
        (("https://h/a", "b"), "https://h/a/b"),
    ],
)
def test_join_puts_one_slash_between(parts: tuple[str, ...], joined: str) -> None:
    assert join(*parts) == joined


@given(st.lists(st.text("ab %#=?ü€\\", min_size=1, max_size=5), min_size=1, max_size=4))
def test_children_and_joins_agree(names: list[str]) -> None:
    storage = open_storage("s3://bucket/top")
    below = storage
    for name in names:
        below = below.child(name)
    assert below.uri == join("s3://bucket/top", *names) == storage.child("/".join(names)).uri
    assert open_storage(below.uri) == below


@pytest.mark.parametrize("path", ["", "/x", "x/", "a//b", ".", "a/../b", "./a", "a\tb", ".sdp-draft-1", "a/.sdp-lock"])
def test_a_path_that_leaves_its_folder_or_hides_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"not a relative path|belong to the storage"):
        checked(path)


def test_a_message_shows_no_secret_of_an_address() -> None:
    assert shown("https://user:word@host/a/b.parquet?sig=secret") == "https://host/a/b.parquet?…"
    assert shown("s3://bucket/a?b") == "s3://bucket/a?b"
    assert shown("https://user:word@[x/a?sig=secret") == "https://…"
