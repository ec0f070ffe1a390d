"""Images that cannot be used, latents that are no numbers and a memory that is too small, on a real local Ray."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from sdp.datasets import parts
from sdp.datasets.manifest import Dataset
from sdp.process import job
from tests.kit import accounted
from tests.local_ray import one_node
from tests.misbehaving import bodies
from tests.process_kit import config_of, picture, trouble, write_model
from tests.sandbox_kit import write_poison

ROOM = 3
"""Images that the encoder's memory has room for."""


@pytest.fixture(scope="module", autouse=True)
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("faults")

    def setup() -> None:
        trouble(ROOM, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])

    write_poison(folder)
    with one_node(cpus=3, setup=setup):
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def white() -> bytes:
    sink = io.BytesIO()
    Pillow.fromarray(np.full((80, 80, 3), 255, np.uint8)).save(sink, "PNG")
    return sink.getvalue()


HOSTILE = {
    3: (white(), "not_finite"),
    8: (picture(8)[:-700], "undecodable"),
    11: (bodies.huge_png(30_000, 30_000), "too_many_pixels"),
    17: (b"<html>no such picture</html>", "not_an_image"),
    20: (b"", "empty"),
    29: (white(), "not_finite"),
    30: (None, "empty"),
    33: (picture(33) + b"SEGFAULT", "crashed"),
    35: (picture(35) + b"SPY", "internal"),
    38: (picture(38, 20, 20), "too_small"),
}


def rows_of(dataset: Dataset) -> list[int]:
    tables = [parts.read_rows(dataset.storage, path) for path in dataset.parts["path"].to_pylist()]
    rows: list[int] = pa.concat_tables(tables)["row"].to_pylist()
    return rows


def test_every_hostile_row_has_its_reason_and_all_others_are_there(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    images = [HOSTILE[row][0] if row in HOSTILE else picture(row) for row in range(40)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": [f"c{row}" for row in range(40)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=10)
    summary = job.run(config_of(folder, tmp_path / "out", model, "output.rows_per_file=20", "encode.batch_size=8"))

    dataset = summary.dataset
    assert dataset is not None
    assert rows_of(dataset) == [row for row in range(40) if row not in HOSTILE]
    assert accounted(dataset) == list(range(40))
    accounts = [parts.read_account(dataset.storage, path) for path in dataset.parts["path"].to_pylist()]
    lines = {line["row"]: line for line in pa.concat_tables(accounts).to_pylist() if line["reason"]}
    assert {row: line["reason"] for row, line in lines.items()} == {row: reason for row, (_, reason) in HOSTILE.items()}
    counts = dataset.manifest.counts
    assert (counts.input, counts.written, counts.failed) == (40, 30, 10)
    stored = pa.concat_tables([parts.read_rows(dataset.storage, path) for path in dataset.parts["path"].to_pylist()])
    assert np.isfinite(np.frombuffer(b"".join(stored["latents_64"].to_pylist()), np.float16)).all()

    assert "the decoder died of signal 11, twice" in lines[33]["detail"]
    assert "PermissionError" in lines[35]["detail"]
    assert summary.figures.deaths == 0, "a small memory and a bad image kill nobody"
    assert summary.figures.fitting == {64: 2}, "of 8, halved until they fit"
    assert "split to 2; set encode.batch_size" in capsys.readouterr().err


def test_what_was_not_finite_can_be_tried_again_and_a_device_that_fails_is_replaced(
    tmp_path: Path, model: Path, faults: Path
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    images = [white() if row == 4 else picture(row) for row in range(10)]
    pq.write_table(pa.table({"image": pa.array(images, pa.binary()), "caption": ["c"] * 10}), folder / "a.parquet")
    config = config_of(folder, tmp_path / "out", model, "output.rows_per_file=10")
    (faults / "start").touch()
    (faults / "device").touch()
    first = job.run(config)
    assert first.figures.deaths == 2, "one that did not start, one whose device failed at work"
    assert first.figures.counts.written == 9, "and no row for that"
    second = job.run(config, only_failed=True)
    assert first.dataset is not None
    assert second.dataset is not None
    assert dict(second.dataset.manifest.counts.reasons) == {"not_finite": 1}
    assert second.figures.images_encoded == 1, "the row that failed, and no other"
