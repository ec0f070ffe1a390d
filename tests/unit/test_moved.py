"""Moved datasets, sources and runs: their content counts, not their place."""

import shutil
from pathlib import Path

import pytest

from sdp.config import identity, parse
from sdp.datasets.manifest import finish, open_dataset
from sdp.datasets.output import Head, Output, open_output, read_output
from sdp.datasets.source import freeze_source, publish_plan
from sdp.datasets.tombstones import lineage
from sdp.errors import DatasetError
from sdp.storage import SourceFile, list_source, open_storage
from sdp.storage.moved import unchanged
from sdp.storage.uri import near, resolved
from tests.kit import begin_latents, make_images, make_latents, write_images_part, write_source


def frozen(images: Path, source: Path, *, writes: bool = True) -> Output:
    """Return the frozen source that a download into this folder starts from."""
    output = open_output(open_storage(str(images)), Head("images", 10, False, {"image.size": 256}), writes=writes)
    files = list_source(str(source))
    return freeze_source(output, files, ["URL", "TEXT"], uri=str(source))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A source and a complete dataset of it."""
    write_source(tmp_path / "here/source", [("a.parquet", 25)])
    write_source(tmp_path / "here/source/more", [("b.parquet", 17)], first=25)
    output = frozen(tmp_path / "here/images", tmp_path / "here/source")
    for work in output.pending():
        write_images_part(output.storage, work)
    finish(output, input={"uri": str(tmp_path / "here/source")})
    return tmp_path / "here"


def test_a_copied_folder_is_complete_and_names_its_own_source(here: Path) -> None:
    copied = here.parent / "there"
    shutil.copytree(here, copied, copy_function=shutil.copyfile)  # times are new, contents are not
    shutil.rmtree(here)
    output = frozen(copied / "images", copied / "source")
    assert (output.index.rows, output.pending()) == (42, [])
    assert [Path(path).read_bytes()[:4] for path in output.index.files["path"].to_pylist()] == [b"PAR1", b"PAR1"]
    assert output.storage.names("_index") == ["_index/000000.pq"]
    before = open_dataset(output.storage)
    assert before.manifest.input == {"uri": str(copied / "source")}
    assert finish(output, input={"uri": str(copied / "source")}).digest == before.digest  # its descendants continue


def test_a_source_that_has_moved_alone_keeps_its_rows_and_is_noted_at_its_new_place(here: Path) -> None:
    shutil.copytree(here / "source", here.parent / "far/away/metadata", copy_function=shutil.copyfile)
    shutil.rmtree(here / "source")
    away = here.parent / "far/away/metadata"
    planned = frozen(here / "images", away, writes=False)
    assert planned.pending() == []
    publish_plan(read_output(planned.storage), planned)
    noted = read_output(planned.storage).index
    assert noted.files["path"].to_pylist() == [str(away / "a.parquet"), str(away / "more/b.parquet")]
    write_source(away, [("c.parquet", 8)], first=42)
    assert frozen(here / "images", away).index.rows == 50
    assert read_output(planned.storage).index.files["path"].to_pylist()[2] == str(away / "c.parquet")


def test_another_source_is_refused_where_a_file_is_missing_or_holds_something_else(here: Path) -> None:
    other = shutil.copytree(here / "source", here / "other")
    (other / "more/b.parquet").unlink()
    with pytest.raises(DatasetError, match=r"other is another source than .* \(.*other/more/b\.parquet is not there\)"):
        frozen(here / "images", other)
    content = bytearray((here / "source/more/b.parquet").read_bytes())
    content[20] ^= 1
    (other / "more/b.parquet").write_bytes(content)
    with pytest.raises(DatasetError, match=r"b\.parquet has changed since its rows got their addresses"):
        frozen(here / "images", other)


def test_a_file_of_a_bucket_that_is_local_now_is_compared_by_its_md5(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")  # $ printf hello | md5sum
    file = SourceFile(str(tmp_path / "a"), 5, "18c-5")
    assert unchanged(file, 5, '"5d41402abc4b2a76b9719d911017c592"')
    assert not unchanged(file, 5, '"5d41402abc4b2a76b9719d911017c593"')
    assert not unchanged(file, 5, '"5d41402abc4b2a76b9719d911017c592-3"')


def test_a_copied_dataset_keeps_its_descendants(here: Path, tmp_path: Path) -> None:
    make_images(tmp_path / "a")
    make_latents(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    latents = open_storage(str(tmp_path / "b/latents"))
    assert [dataset.uri for dataset in lineage(latents)] == [str(tmp_path / "b/latents"), str(tmp_path / "b/images")]
    patient = latents.with_options(timeout_s=7.0)
    assert [dataset.options.timeout_s for dataset in lineage(patient)] == [7.0, 7.0], "one endpoint serves them all"
    assert begin_latents(tmp_path / "b").pending() == []
    shutil.rmtree(tmp_path / "b/images")
    shutil.move(here / "images", tmp_path / "b/images")  # as large, and another one
    with pytest.raises(DatasetError, match=r"images/parts/.* has changed since its rows got their addresses"):
        begin_latents(tmp_path / "b")


def test_an_address_is_kept_relative_only_where_both_lie_close_together() -> None:
    for uri, folder, kept in (
        ("/data/images", "/data/latents", "../images"),
        ("/data/a/images", "/data/b/latents", "../../a/images"),
        ("/data/drawn/_prompts", "/data/drawn", "./_prompts"),
        ("s3://b/demo/images", "s3://b/demo/latents", "../images"),
        ("s3://b/images", "s3://c/latents", "s3://b/images"),
        ("/home/me/metadata", "/mnt/fast/disk/images", "/home/me/metadata"),
        ("https://host/a.parquet", "/data/images", "https://host/a.parquet"),
    ):
        assert near(uri, folder) == kept
        assert resolved(kept, folder) == uri


def test_an_identity_names_no_place() -> None:
    def of(place: str) -> object:
        also = [{"uri": f"{place}/more", "weight": 2.0}]
        data = {"source": {"uri": f"{place}/latents", "also": also}, "output": {"uri": f"{place}/run"}}
        return identity(parse("train", {**data, "model": {"source": f"{place}/model"}}))

    assert of("/a") == of("/b")
    assert "/a" not in str(of("/a"))
