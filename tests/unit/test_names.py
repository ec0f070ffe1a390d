"""Names of addresses in their source: image files and URLs."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets import names
from sdp.datasets.names import finder, names_of
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.source import freeze_files, freeze_source
from sdp.errors import UserError
from sdp.storage import list_source, open_storage
from tests.kit import write_files


def output(folder: Path, **identity: str) -> Output:
    return open_output(open_storage(str(folder)), Head("images", 4, False, identity))


def test_a_row_of_a_table_is_named_by_its_url(tmp_path: Path) -> None:
    for name, numbers in (("a", range(7)), ("b", range(7, 9))):
        table = pa.table({"URL": [f"https://a.example/{n}" for n in numbers], "n": list(numbers)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    freeze_source(output(tmp_path / "out", **{"source.url_column": "URL"}), list_source(str(tmp_path)), ["URL"])
    names = names_of(open_storage(str(tmp_path / "out")))
    assert names(np.array([1, 2, 3, 6, 7])) == [f"https://a.example/{n}" for n in (1, 2, 3, 6, 7)]
    (tmp_path / "b.parquet").unlink()
    assert names_of(open_storage(str(tmp_path / "out")))(np.array([8])) == [""], "its source is gone"


def test_a_url_that_is_not_utf8_is_named_with_replaced_bytes(tmp_path: Path) -> None:
    urls = pa.Array.from_buffers(pa.string(), 1, pa.array([b"http://a/\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"url": urls}), tmp_path / "a.parquet")
    freeze_source(output(tmp_path / "out"), list_source(str(tmp_path)), ["url"])
    assert names_of(open_storage(str(tmp_path / "out")))(np.array([0])) == ["http://a/\ufffd"]


def test_an_image_file_is_named_and_traced_by_its_name(tmp_path: Path) -> None:
    write_files(tmp_path, {name: name for name in ("a/1.jpg", "b/1.jpg", "b/2.jpg")})
    freeze_files(output(tmp_path / "out"), list_source(str(tmp_path), suffixes=(".jpg",)))
    out = open_storage(str(tmp_path / "out"))
    assert names_of(out)(np.array([0, 2])) == [str(tmp_path / "a/1.jpg"), str(tmp_path / "b/2.jpg")]
    rows_of = finder(out)
    assert (rows_of("2.jpg"), rows_of("./b/1.jpg")) == ([2], [1])
    named = (("1.jpg", "2 pictures are named 1.jpg; give more"), (".jpg", "no picture is named .jpg; give whole names"))
    for name, hint in named:
        with pytest.raises(UserError, match=hint):
            rows_of(name)
    with patch.object(names, "_root", side_effect=AssertionError("it is read once, however many names are asked for")):
        assert rows_of("a/1.jpg") == [0]
    pq.write_table(pa.table({"url": ["https://a.example/1"]}), tmp_path / "a.parquet")
    freeze_source(output(tmp_path / "urls"), list_source(str(tmp_path / "a.parquet")), ["url"])
    with pytest.raises(UserError, match="its rows are of tables, not of image files; use --url in place of a name"):
        finder(open_storage(str(tmp_path / "urls")))("1.jpg")
