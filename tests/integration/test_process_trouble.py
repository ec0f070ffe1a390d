"""Bad images, latents that are no numbers, too little memory and whatever is killed: each row has one outcome."""

import io
import os
import signal
from collections import Counter
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
from tests.kit import account_of, accounted, not_none, reasons_of, rows_of
from tests.local_ray import one_node
from tests.misbehaving import bodies
from tests.process_kit import DEADLY, config_of, follow_instructions, make_images, picture, trouble
from tests.sandbox_kit import write_poison
from tests.waiting import as_soon_as

ROOM = 3
"""Images that the encoder's memory has room for."""


@pytest.fixture(scope="module", autouse=True)
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("faults")
    traces = folder / "traces"
    traces.mkdir()
    (traces / "wanted").write_text("1")

    def setup() -> None:
        trouble(ROOM, str(folder))
        follow_instructions(str(traces))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])

    write_poison(folder)
    with one_node(cpus=3, setup=setup):
        yield folder


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


def test_every_hostile_row_has_its_reason_and_all_others_are_there(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    images = [HOSTILE[row][0] if row in HOSTILE else picture(row) for row in range(40)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": [f"c{row}" for row in range(40)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=10)
    summary = job.run(config_of(folder, tmp_path / "out", model, "output.rows_per_file=20", "encode.batch_size=8"))

    dataset = not_none(summary.dataset)
    stored = rows_of(dataset)
    assert stored["row"].to_pylist() == [row for row in range(40) if row not in HOSTILE]
    assert accounted(dataset) == list(range(40))
    assert reasons_of(dataset) == {row: reason for row, (_, reason) in HOSTILE.items()}
    counts = dataset.manifest.counts
    assert (counts.input, counts.written, counts.failed) == (40, 30, 10)
    assert np.isfinite(np.frombuffer(b"".join(stored["latents_64"].to_pylist()), np.float16)).all()

    details = {line["row"]: line["detail"] for line in account_of(dataset).to_pylist()}
    assert "the decoder died of signal 11, twice" in details[33]
    assert "PermissionError" in details[35]
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
    assert dict(not_none(second.dataset).manifest.counts.reasons) == {"not_finite": 1}
    assert second.figures.images_encoded == 1, "the row that failed, and no other"


# --- what is killed ------------------------------------------------------------------------------------------------


@pytest.fixture
def traces(faults: Path) -> Path:
    """The notes of encoders, as `follow_instructions` says."""
    for note in (faults / "traces").glob("*-*"):
        note.unlink()
    return faults / "traces"


def chunks_in(traces: Path) -> dict[str, int]:
    """The notes of encoded chunks, each with its encoder's process."""
    return {note.name: int(note.name.split("-")[0]) for note in traces.glob("[0-9]*-*")}


def check_whole(dataset: Dataset, rows: list[int]) -> None:
    """Every part keeps its own account, and every address has one outcome."""
    for file in dataset.storage.list("parts"):
        parts.verify_part(dataset.storage, file)
    assert Counter(accounted(dataset)) == Counter(rows)


@pytest.mark.slow
def test_a_picture_that_kills_its_worker_is_isolated_and_recorded(tmp_path: Path, model: Path) -> None:
    def image(row: int) -> bytes:
        return picture(row) + (DEADLY if row == 23 else b"")

    # A dataset's own images are decoded in the worker; others would kill a sandbox's decoder alone.
    make_images(tmp_path, rows=60, unit_rows=20, fails=lambda _: False, image=image)
    summary = job.run(config_of(tmp_path / "images", tmp_path / "out", model, "output.rows_per_file=30"))
    assert summary.dataset is not None
    counts = summary.dataset.manifest.counts
    assert (counts.written, counts.failed, dict(counts.reasons)) == (59, 1, {"crashed": 1})
    check_whole(summary.dataset, list(range(60)))
    account = parts.read_account(summary.dataset.storage, summary.dataset.parts["path"][0].as_py()).to_pylist()
    assert (account[23]["reason"], account[23]["attempts"]) == ("crashed", 2)
    assert 2 <= summary.figures.deaths <= 6


@pytest.mark.slow
def test_an_encoder_that_is_killed_is_replaced_and_nothing_is_lost(tmp_path: Path, model: Path, traces: Path) -> None:
    make_images(tmp_path, rows=120, unit_rows=40)
    killed: list[int] = []

    def kill(_: object) -> None:
        killed.append(next(iter(chunks_in(traces).values())))
        os.kill(killed[0], signal.SIGKILL)

    killer = as_soon_as(lambda: len(chunks_in(traces)) >= 3, kill)
    summary = job.run(config_of(tmp_path / "images", tmp_path / "out", model, "output.rows_per_file=40"))
    killer.join()
    assert summary.dataset is not None
    assert summary.figures.deaths >= 1
    assert len(set(chunks_in(traces).values())) == 2, "another one took over"
    assert summary.dataset.manifest.counts.written == 108
    check_whole(summary.dataset, [row for row in range(120) if row % 10 != 7])
