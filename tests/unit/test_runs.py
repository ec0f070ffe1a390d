"""The record of each run of a job, beside its output."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdp.datasets import runs
from sdp.datasets.parts import PartInfo
from sdp.datasets.records import dump
from sdp.errors import Unavailable
from sdp.storage import Storage
from tests.kit import begin_images, write_images_part


def made(root: Path) -> tuple[Storage, list[PartInfo]]:
    """A dataset's folder, and the parts that a run has made in it."""
    output = begin_images(root)
    return output.storage, [write_images_part(output.storage, work) for work in output.pending()]


def test_the_record_of_a_run_is_read_back_unchanged(tmp_path: Path) -> None:
    storage, infos = made(tmp_path)
    run = runs.begin("download").ended(infos, work={"encoders": {"at work": 1.25, "waiting": 0.0}})
    runs.keep(storage, run)
    assert runs.read(storage) == ([run], [])
    assert (run.counts.input, run.counts.failed, run.counts.filtered) == (42, 6, 3)
    assert run.counts.reasons == {"http_status": 6, "min_size": 3}
    assert 0 <= run.seconds < 60
    assert run.began <= run.ended


def test_each_run_has_a_record_of_its_own_and_one_that_did_nothing_has_none(tmp_path: Path) -> None:
    storage, infos = made(tmp_path)
    for parts in (infos[:2], [], infos[2:]):
        runs.keep(storage, runs.begin("download").ended(parts))
    assert storage.names(runs.FOLDER) == ["_runs/000001.json", "_runs/000002.json"]
    assert [run.counts.input for run in runs.read(storage)[0]] == [20, 22]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "[" * 100_000,
        lambda _: "[]",
        lambda data: {**data, "format": 2},
        lambda data: {**data, "seconds": float("nan")},
        lambda data: {**data, "began": "<script>"},
        lambda data: {**data, "counts": {**data["counts"], "written": 7}},
        lambda data: {**data, "work": {"encoders": {"at work": "1"}}},
        lambda data: {name: value for name, value in data.items() if name != "ended"},
    ],
)
def test_a_damaged_record_is_reported_and_the_others_are_read(tmp_path: Path, damage: Callable[[Any], object]) -> None:
    storage, infos = made(tmp_path)
    run = runs.begin("download").ended(infos)
    damaged = damage(json.loads(dump(run)))
    storage.publish("_runs/000001.json", (damaged if isinstance(damaged, str) else json.dumps(damaged)).encode())
    storage.publish("_runs/notes.txt", b"not ours")
    runs.keep(storage, run)
    records, notes = runs.read(storage)
    assert records == [run]
    assert "_runs/000001.json: damaged record of a run (" in notes[0]
    assert notes[1].endswith("_runs/notes.txt: not a record of a run, so it is ignored")
    assert len(notes) == 2


def test_a_record_that_cannot_be_written_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage, infos = made(tmp_path)

    def full(path: str, _: bytes) -> None:
        raise Unavailable(f"{path}: no space left on the device")

    monkeypatch.setattr(storage, "create", full)
    with caplog.at_level(logging.WARNING):
        runs.keep(storage, runs.begin("download").ended(infos))
    assert "could not be stored, so reports lack it: _runs/000001.json: no space left" in caplog.text
