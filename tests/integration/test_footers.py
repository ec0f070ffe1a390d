"""Footers of strangers' Parquet files that end the process that reads them."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config.process import JoinedTable
from sdp.datasets import footers
from sdp.datasets.footers import read_new_footer
from sdp.datasets.output import Head, open_output
from sdp.datasets.source import freeze_source
from sdp.errors import DatasetError, SdpError
from sdp.sources.joined import open_tables
from sdp.sources.pictures import open_pictures
from sdp.storage import StorageOptions, list_source, open_storage
from sdp.train.data import plain
from tests.growth.forged import cut_statistics, write_deadly

OPTIONS = StorageOptions()


def write(path: Path) -> Path:
    pq.write_table(pa.table({"row": pa.array([7, 9], pa.int64()), "caption": ["a", "b"]}), path)
    return path


def freeze(source: str) -> int:
    output = open_output(open_storage(f"{source}/../out"), Head("images", 2, False, {}))
    return freeze_source(output, list_source(source), ["caption"]).index.rows


def test_a_deadly_file_is_named_at_each_start_and_others_are_read(tmp_path: Path) -> None:
    deadly = write_deadly(tmp_path / "source/1.parquet")
    write(tmp_path / "source/0.parquet"), write(tmp_path / "source/2.parquet")
    for _ in range(2):
        with pytest.raises(DatasetError, match=r"/1\.parquet: its footer crashes the reader .* \(SIGABRT\); remove or"):
            freeze(str(tmp_path / "source"))
    deadly.unlink()
    assert freeze(str(tmp_path / "source")) == 4


@pytest.mark.parametrize(
    "read",
    [
        lambda uri: open_pictures("source", uri, OPTIONS),
        lambda uri: open_tables("tables", [JoinedTable(uri=uri, by="caption")], ["caption"], [], OPTIONS),
        lambda uri: plain.freeze(open_storage(f"{uri}/../run"), 0, uri, OPTIONS, write=False),
    ],
    ids=["pictures", "a table", "latents"],
)
def test_no_reader_of_strangers_files_dies(read: Callable[[str], object], tmp_path: Path) -> None:
    write_deadly(tmp_path / "source/a.parquet")
    with pytest.raises(DatasetError, match=r"/a\.parquet: its footer crashes the reader"):
        read(str(tmp_path / "source"))


def test_a_table_with_statistics_that_end_their_reader_is_refused(tmp_path: Path) -> None:
    table = JoinedTable(uri=str(write(tmp_path / "a.parquet")), by="row")
    (joined,) = open_tables("tables", [table], ["caption"], [], OPTIONS)
    assert (joined.first.tolist(), joined.last.tolist()) == ([7], [9])
    cut_statistics(tmp_path / "a.parquet", 9)
    assert read_new_footer(table.uri, None).num_rows == 2, "they are not read without need"
    with pytest.raises(DatasetError, match=r"/a\.parquet: its footer crashes the reader .* \(SIGABRT\)"):
        open_tables("tables", [table], ["caption"], [], OPTIONS)


def test_a_reader_that_has_ended_is_started_again(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    for _ in range(2):
        assert read_new_footer(str(file), None).num_rows == 2
        assert footers._reader is not None
        footers._reader._process.kill()
        footers._reader._process.wait()


def test_a_reader_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footers, "_reader", None)
    read_new_footer(str(write(tmp_path / "a.parquet")), None)
    assert footers._reader is not None
    footers._reader.pipe.close()
    assert footers._reader._process.wait(30) == 0


def test_a_reader_that_cannot_start_blames_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footers, "_reader", None)
    monkeypatch.setattr(footers.sys, "executable", "/bin/false")
    with pytest.raises(SdpError, match=r"^the process that reads Parquet's footers does not start \(exit") as caught:
        read_new_footer(str(write(tmp_path / "a.parquet")), None)
    assert caught.value.exit_code == 1
