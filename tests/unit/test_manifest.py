"""Outputs and manifests: complete or not, and counts that add up."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc
import pytest

from sdp.datasets import manifest as manifests
from sdp.datasets.manifest import finish, open_dataset
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, Output, open_output, read_output
from sdp.datasets.parts import read_account, resolve, write_part
from sdp.datasets.source import freeze_files, order_retry
from sdp.errors import DatasetError
from sdp.storage import Storage, list_source, open_storage
from tests.kit import (
    LAYOUT,
    accounted,
    begin_images,
    image_rows,
    make_images,
    make_latents,
    write_images_part,
)


def test_a_dataset_is_complete_when_its_manifest_is_there(tmp_path: Path) -> None:
    output = begin_images(tmp_path)
    with pytest.raises(DatasetError, match=r"incomplete.*sdp inspect"):
        open_dataset(output.storage)
    for work in output.pending()[1:3]:
        write_images_part(output.storage, work)
    with pytest.raises(DatasetError, match=r"3 parts missing, first parts/000000000\.parquet"):
        finish(output)
    works = read_output(output.storage).pending()
    assert [work.unit.number for work in works] == [0, 3, 4]
    for work in works:
        write_images_part(output.storage, work)
    dataset = finish(output, config={"limit": None}, models={"vae": "abc"}, input={"uri": "src"})
    reopened = open_dataset(output.storage, "images")
    assert reopened.manifest == dataset.manifest
    assert reopened.manifest.counts.to_json() == {
        "input": 42, "written": 33, "filtered": 3, "failed": 6, "reasons": {"http_status": 6, "min_size": 3},
    }  # fmt: skip
    assert sorted(accounted(reopened)) == list(range(42))
    with pytest.raises(DatasetError, match="expected a dataset of latents, got images"):
        open_dataset(output.storage, "latents")
    with pytest.raises(DatasetError, match="not a dataset of sdp"):
        open_dataset(open_storage(str(tmp_path)))


def test_a_job_killed_between_the_two_manifest_writes_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = begin_images(tmp_path)
    for work in output.pending():
        write_images_part(output.storage, work)
    create = type(output.storage).create

    def die(self: object, path: str, data: bytes) -> object:
        if path == manifests.MANIFEST:
            raise KeyboardInterrupt
        return create(self, path, data)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(type(output.storage), "create", die)
        with pytest.raises(KeyboardInterrupt):
            finish(output)
    assert not output.storage.exists(manifests.MANIFEST)
    assert finish(begin_images(tmp_path)).manifest.version == 1
    assert open_dataset(output.storage).manifest.counts.input == 42


def test_an_output_of_another_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    make_images(tmp_path)
    storage = open_storage(str(tmp_path / "images"))
    for head, message in (
        (Head("images", 10, False, {"image.size": 512}), r"image\.size was 256 and is 512 now.*another output\.uri"),
        (Head("images", 20, False, {"image.size": 256}), "output.rows_per_file was 10 and is 20 now"),
        (Head("latents", 10, True, {}), "holds a dataset of images, not of latents"),
    ):
        with pytest.raises(DatasetError, match=message):
            open_output(storage, head)


def retry(root: Path, succeed: bool = True, end: BaseException | None = None) -> None:
    """Another attempt at the failed images."""
    output = order_retry(begin_images(root), open_dataset(open_storage(str(root / "images"))))
    for work in output.pending():
        unit = work.unit
        earlier = [w for w in output.index.works() if w.unit == unit and w.attempt < work.attempt]
        account = resolve([read_account(output.storage, w.name) for w in earlier])
        rows = account.filter(pc.field("outcome") == FAILED)["row"].to_pylist()
        outcomes = [Outcome(r, WRITTEN) if succeed else Outcome(r, FAILED, "timeout") for r in rows]
        reasons = [x for x in account["reason"].to_pylist() if x == "http_status" or (x == "timeout")]
        retried = {reason: reasons.count(reason) for reason in set(reasons)}
        table = image_rows(rows if succeed else [])
        write_part(output.storage, "images", work, table, account_table(outcomes), layout=LAYOUT, retried=retried)
    if end is not None:
        raise end
    finish(output)


def test_a_retry_that_fails_again_counts_once_and_can_be_tried_again(tmp_path: Path) -> None:
    make_images(tmp_path)
    retry(tmp_path, succeed=False)
    dataset = open_dataset(open_storage(str(tmp_path / "images")))
    assert dataset.manifest.counts.to_json()["reasons"] == {"min_size": 3, "timeout": 6}
    retry(tmp_path)
    assert open_dataset(dataset.storage).manifest.counts.failed == 0
    assert sum(name.endswith(".a002.parquet") for name in dataset.storage.names("parts/")) > 0


def test_a_retry_that_was_cut_short_is_continued(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    ordered = order_retry(begin_images(tmp_path), dataset)
    retried = order_retry(begin_images(tmp_path), dataset)
    assert retried.pending() == ordered.pending()
    assert len(retried.index.versions) == 2


def test_a_retry_that_has_all_its_parts_but_no_manifest_is_finished_first(tmp_path: Path) -> None:
    make_images(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        retry(tmp_path, succeed=False, end=KeyboardInterrupt())
    retry(tmp_path, succeed=False)
    dataset = open_dataset(open_storage(str(tmp_path / "images")))
    assert set(dataset.parts["attempt"].to_pylist()) == {0, 1}
    assert len(dataset.storage.names("_index/")) == 2
    retry(tmp_path)
    assert set(open_dataset(dataset.storage).parts["attempt"].to_pylist()) == {0, 1, 2}


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_picture_that_is_replaced_after_it_has_failed_is_known_to_later_runs(
    tmp_path: Path, *, interrupted: bool
) -> None:
    source = tmp_path / "pictures"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_text(name)

    def freeze(output: Output) -> Output:
        return freeze_files(output, list_source(str(source), suffixes=("",)), uri=str(source))

    def run(output: Output, outcomes: Sequence[Outcome], retried: dict[str, int]) -> None:
        for work in output.pending():
            rows = image_rows(outcome.row for outcome in outcomes if outcome.outcome == WRITTEN)
            write_part(output.storage, "images", work, rows, account_table(outcomes), layout=LAYOUT, retried=retried)
        finish(output)

    storage = open_storage(str(tmp_path / "images"))
    head = Head("images", 10, False, {})
    bad = Outcome(1, FAILED, "undecodable")
    run(freeze(open_output(storage, head)), [Outcome(0, WRITTEN), bad, Outcome(2, WRITTEN)], {})
    if interrupted:  # before the picture is replaced
        order_retry(read_output(storage), open_dataset(storage), list_source(str(source), suffixes=("",)))
    (source / "b").write_text("mended")
    with pytest.raises(DatasetError, match="b has changed since its rows got their addresses"):
        freeze(read_output(storage))
    files = list_source(str(source), suffixes=("",))
    output = order_retry(read_output(storage), open_dataset(storage), files)
    assert [(work.name, work.attempt) for work in output.pending()] == [("parts/000000000.a001.parquet", 1)]
    run(output, [Outcome(1, WRITTEN)], {"undecodable": 1})
    assert freeze(read_output(storage)).pending() == []
    moved = (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    files = list_source(str(moved), suffixes=("",))
    assert freeze_files(read_output(storage), files, uri=str(moved)).pending() == []
    (moved / "a").write_text("another")
    with pytest.raises(DatasetError, match="a has changed since its rows got their addresses"):
        order_retry(read_output(storage), open_dataset(storage), list_source(str(moved), suffixes=("",)))


@pytest.mark.parametrize("limit", [5, 13, 33])
def test_a_limit_raised_after_a_retry_upstream_loses_nothing_and_doubles_nothing(tmp_path: Path, limit: int) -> None:
    make_images(tmp_path)
    make_latents(tmp_path, limit=limit)
    retry(tmp_path)
    make_latents(tmp_path, limit=limit)
    latents = make_latents(tmp_path)
    filtered = {r for r in range(42) if r % 7 != 3 and r % 11 == 5}
    assert sorted(accounted(latents)) == sorted(set(range(42)) - filtered)


def test_an_unexpected_part_is_detected(tmp_path: Path) -> None:
    make_images(tmp_path)
    (tmp_path / "images/parts/000000000.parquet").rename(tmp_path / "images/parts/000000099.parquet")
    output = begin_images(tmp_path)
    write_images_part(output.storage, output.pending()[0])
    with pytest.raises(DatasetError, match=r"000000099\.parquet"):
        finish(output)


def test_an_account_that_lost_a_row_is_not_called_complete(tmp_path: Path) -> None:
    output = begin_images(tmp_path)
    for work in output.pending():
        rows = range(work.unit.start, work.unit.stop - (work.unit.number == 2))
        account = account_table([Outcome(row, WRITTEN) for row in rows])
        write_part(output.storage, "images", work, image_rows(rows), account, layout=LAYOUT)
    with pytest.raises(DatasetError, match="42 addresses in the index, 41 with an outcome"):
        finish(output)


def test_a_manifest_whose_counts_do_not_add_up_is_refused(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    file = tmp_path / "images" / manifests.MANIFEST
    data = json.loads(file.read_text())
    data["counts"]["written"] += 1
    file.write_text(json.dumps(data))
    with pytest.raises(DatasetError, match="counts do not add up"):
        open_dataset(dataset.storage)


def test_a_manifest_that_is_replaced_while_it_is_read_keeps_its_own_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_images(tmp_path)
    file, read = tmp_path / "images" / manifests.MANIFEST, type(dataset.storage).read
    newer = json.dumps({**json.loads(file.read_text()), "version": 7})

    def read_and_replace(self: Storage, path: str) -> bytes:
        content = read(self, path)  # type: ignore[arg-type]
        if path == manifests.MANIFEST:
            file.write_text(newer)
        return content

    monkeypatch.setattr(type(dataset.storage), "read", read_and_replace)
    first, second = open_dataset(dataset.storage), open_dataset(dataset.storage)
    assert (first.digest, first.manifest.version) == (dataset.digest, 1)
    assert (second.digest, second.manifest.version) == (hashlib.sha256(newer.encode()).hexdigest(), 7)


@pytest.mark.parametrize(
    ("lost", "message"),
    [("_dataset.json", r"has parts but no _dataset\.json"), ("_index/*", r"has parts but no index \(_i")],
)
@pytest.mark.parametrize("writes", [True, False])
def test_parts_without_their_head_or_index_are_not_written_beside(
    tmp_path: Path, lost: str, message: str, writes: bool
) -> None:
    storage = make_images(tmp_path).storage
    for file in (tmp_path / "images").glob(lost):
        file.unlink()
    with pytest.raises(DatasetError, match=message):
        open_output(storage, Head("images", 10, False, {"image.size": 256}), writes=writes)
