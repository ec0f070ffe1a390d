"""A damaged dataset: one line names the file and the field, and everything else is still reported."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.cli import main
from sdp.datasets.audit import audit
from sdp.datasets.inspect import describe, write_account
from sdp.datasets.manifest import finish, open_dataset
from sdp.datasets.output import Head, open_output, read_head, read_output
from sdp.errors import DatasetError
from sdp.report.sections import gather
from sdp.storage import open_storage
from tests.kit import begin_images, make_images, make_latents, write_images_part, write_source

DEEP = "[" * 100_000
HUGE = "9" * 5000


def change(file: Path, path: str, value: Any) -> None:
    """Put a value at a dotted path of a JSON file, or with ... take it out."""
    data = json.loads(file.read_text())
    at = data
    *above, last = path.split(".")
    for name in above:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("unit_rows", "x"), ("unit_rows", 0), ("unit_rows", 10**30), ("unit_rows", ...), ("unit_rows", 1.5),
        ("kind", "../x"), ("identity", []), ("derived", "no"), ("format", "1"), ("format", 2),
    ],
)  # fmt: skip
def test_a_damaged_field_of_the_head_is_named_with_its_file(
    tmp_path: Path, path: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path).storage
    change(tmp_path / "images/_dataset.json", path, value)
    named = rf"images/_dataset\.json: (malformed \()?{path}"
    with pytest.raises(DatasetError, match=named) as error:
        read_head(images)
    assert "\n" not in str(error.value)
    for arguments in (["inspect", images.uri], ["audit", images.uri, "--row", "3"], ["report", images.uri]):
        assert main(arguments) == 2
        assert re.search(named, capsys.readouterr().err)
    with pytest.raises(DatasetError, match=r"_dataset\.json"):
        open_output(images, Head("images", 10, False, {"image.size": 256}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("files", "../../etc/passwd"), ("files_digest", "x"), ("models", {"vae": 3}), ("input", []),
        ("input", {"manifest_digest": "x"}), ("input", {"uri": 3}), ("rows", "40"), ("rows", 10**30), ("counts", None),
        ("counts.written", -1), ("counts.written", ...), ("counts.reasons", {"http_status": "6"}), ("version", 0),
        ("config", 3), ("schema", {"row": 3}), ("repeated", "x"), ("format", "1"),
    ],
)  # fmt: skip
def test_a_damaged_field_of_the_manifest_is_a_problem_and_does_not_hide_the_dataset(
    tmp_path: Path, path: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path)
    images = make_latents(tmp_path).storage
    change(tmp_path / "latents/_manifest.json", path, value)
    with pytest.raises(DatasetError, match=r"latents/_manifest\.json: ") as error:
        open_dataset(images)
    assert path in str(error.value)
    described = describe(images)
    assert described.counts.input == 33
    assert not described.complete
    assert any("_manifest.json" in problem and path in problem for problem in described.problems)
    (section,) = gather([images.uri], pictures=4)
    assert section.verdict.startswith("Damaged")
    assert main(["audit", images.uri, "--row", "12"]) == 2
    assert path in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [DEEP, f'{{"format": {HUGE}}}', '{"format": 1e999}', "[]", "null", '"', "\udcff", ""]
)
@pytest.mark.parametrize("name", ["_dataset.json", "_manifest.json"])
def test_a_file_that_is_not_a_json_object_is_reported_in_one_line(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path).storage
    (tmp_path / "images" / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    for arguments in (["inspect", images.uri], ["audit", images.uri, "--row", "3"]):
        assert main(arguments) in (1, 2)
        assert f"images/{name}: " in "".join(capsys.readouterr())


def test_false_counts_are_detected_and_corrected_by_the_next_run(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage
    for name in ("_manifest.json", "_manifests/000001.json"):
        change(tmp_path / "images" / name, "counts.written", 34)
        change(tmp_path / "images" / name, "counts.input", 43)
    described = describe(images, verify=True)
    assert [problem.partition(": ")[2] for problem in described.problems] == [
        "counts.input is 43, but 42 in its parts; run the job again to rewrite it",
        "counts.written is 34, but 33 in its parts; run the job again to rewrite it",
    ]
    assert finish(begin_images(tmp_path)).manifest.version == 2
    assert describe(images).complete


def test_parts_added_by_a_running_job_are_not_a_problem_of_the_manifest(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage
    write_source(tmp_path / "source", [("c.parquet", 11)], first=42)
    output = begin_images(tmp_path)
    write_images_part(output.storage, output.pending()[0])
    described = describe(images)
    assert described.problems == []
    assert len(described.missing) == 1


def test_foreign_names_beside_a_dataset_and_a_damaged_earlier_manifest_change_nothing(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage
    for name in ("_manifests/zzz.txt", "_manifests/.DS_Store", "_index/.DS_Store", "_index/notes", "_lease/notes.txt"):
        images.publish(name, b"not ours")
    assert describe(images).complete
    assert finish(begin_images(tmp_path), input=open_dataset(images).manifest.input).manifest.version == 1
    images.publish("_manifests/000001.json", b"{}")
    assert finish(begin_images(tmp_path)).manifest.version == 2


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_account_of_the_other_parts_is_written_where_one_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path).storage
    part = tmp_path / "images/parts/000000001.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    file = tmp_path / "account.parquet"
    assert main(["inspect", images.uri, "--json", "--account", str(file)]) == 1
    description = json.loads(capsys.readouterr().out)
    assert any("000000001.parquet: corrupt part" in problem for problem in description["problems"])
    assert pq.read_table(file)["row"].to_pylist() == [*range(10), *range(20, 42)]
    assert main(["inspect", images.uri, "--account", str(tmp_path / "no/account.parquet")]) == 2
    assert "inspect: --account: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("copy", "place", "rows"),
    [
        ("000000002", "000000099", [*range(42)]),
        ("000000002", "000000001", [*range(10), *range(20, 42)]),
        ("000000002", "000000002.a001", [*range(42)]),
    ],
)
def test_a_part_in_a_place_that_is_not_its_own_is_named_and_not_counted(
    tmp_path: Path, copy: str, place: str, rows: list[int]
) -> None:
    images = make_images(tmp_path).storage
    parts = tmp_path / "images/parts"
    (parts / f"{place}.parquet").write_bytes((parts / f"{copy}.parquet").read_bytes())
    described = describe(images)
    assert any(f"{place}.parquet" in problem for problem in described.problems)
    assert described.counts.input == len(rows)
    write_account(images, tmp_path / "account.parquet")
    assert pq.read_table(tmp_path / "account.parquet")["row"].to_pylist() == rows


def test_a_part_of_another_dataset_and_another_file_are_named_and_not_counted(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage
    other = make_images(tmp_path / "other", unit_rows=20).storage
    (tmp_path / "images/parts/000000001.parquet").write_bytes(other.read("parts/000000001.parquet"))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "images/parts/000000000.parquet")
    described = describe(images)
    assert any("000000001.parquet: not a part of this dataset; move it away" in line for line in described.problems)
    assert any("000000000.parquet: corrupt part (not a part of sdp: its footer" in line for line in described.problems)
    assert described.counts.input == 22
    rows, problems = write_account(images, tmp_path / "account.parquet")
    assert rows == 22
    assert len(problems) == 2


# --- what it was made from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["hdfs://nowhere/images", "https://host/images", "s3://bucket/images", "\x00"])
def test_an_upstream_that_cannot_be_read_does_not_hide_the_dataset(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the discard port, without a listener
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    make_images(tmp_path)
    latents = make_latents(tmp_path).storage.with_options(retries=0)
    change(tmp_path / "latents/_manifest.json", "input.uri", uri)
    described = describe(latents)
    assert described.complete
    assert described.counts.input == 33
    assert any("cannot be read" in note for note in described.notes)


def test_a_damaged_list_of_a_run_s_datasets_is_one_line(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path / "run"))
    run.publish("_run.json", b'{"datasets": [3]}')
    with pytest.raises(DatasetError, match=r"_run\.json: malformed .datasets\.0: expected a valid string, got 3"):
        audit([run.uri], row=1)


@pytest.mark.parametrize("head", ['{"extent": [0], "attempt": 0, "units": []}', "[]", DEEP, "truncated",
                                  '{"extent": [5, 42], "attempt": -1, "units": []}',
                                  '{"extent": [0, 42], "attempt": 0, "units": [77]}'])  # fmt: skip
def test_a_damaged_index_is_one_line(tmp_path: Path, head: str) -> None:
    images = make_images(tmp_path).storage
    file = tmp_path / "images/_index/000000.pq"
    table = pq.read_table(file).replace_schema_metadata({b"sdp.index": head.encode()})
    pq.write_table(table, file)
    if head == "truncated":
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DatasetError, match=r"_index.*corrupt index .*restore it from a backup"):
        read_output(images)
