"""The files of a run: strict JSON, read in spite of damage."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdp.errors import DatasetError, Unavailable
from sdp.model.checkpoints import read_marker, read_state
from sdp.model.tensor_index import DamagedCheckpoint
from sdp.storage import Data, FileInfo, Storage, open_storage
from sdp.storage.local import LocalStorage
from sdp.train.metrics_log import MetricsLog
from sdp.train.run_folder import FILE_LINES, RunFolder, metrics_files
from tests.kit import raising


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(open_storage(str(tmp_path / "run")))


def line(step: int, **more: Any) -> dict[str, Any]:
    """One that a report takes."""
    fields = {"samples": 8 * step, "epoch": 0, "workers": 1, "epoch_done": 0.5, "samples_per_s": 1.0, "seconds": 1.0}
    return {"step": step, **fields, **more}


def write(storage: Storage, after: int, *steps: int, **more: Any) -> None:
    """Write metrics like a job that resumes from a step."""
    metrics = MetricsLog(storage, after)
    for step in steps:
        metrics.add(line(step, **more))
    metrics.finish()
    metrics.close()


def strict(data: bytes) -> list[Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(text, parse_constant=refuse) for text in data.splitlines()]


def complete(run: RunFolder, *steps: int) -> None:
    for step in steps:
        marker = {"format": 1, "created": "2026-01-01T00:00:00+00:00", "state": {"step": step, "loss": 0.5}}
        run.checkpoint(step).publish("complete.json", json.dumps(marker).encode())
        run.checkpoint(step).publish("tensors.json", b"")


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_a_non_finite_number_is_written_as_null(run: RunFolder) -> None:
    write(run.storage, 0, 10, gradient_norm=float("nan"), time={"data": float("inf")})
    run.record("bad_step", norms=[1.0, float("-inf")])
    (_, _, name) = metrics_files(run.storage)[-1]
    (record,) = strict(run.storage.read(name))
    assert (record["gradient_norm"], record["time"]) == (None, {"data": None})
    (event,) = strict(run.storage.read("events.jsonl"))
    assert event["norms"] == [1.0, None]


def test_metrics_go_to_files_that_are_not_touched_again_when_they_are_full(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []

    def recorded(real: Callable[..., FileInfo]) -> Callable[..., FileInfo]:
        def write(self: LocalStorage, path: str, data: Data, *etag: str) -> FileInfo:
            sent.append((path, bytes(data).count(b"\n")))
            return real(self, path, data, *etag)

        return write

    for name in ("create", "replace"):
        monkeypatch.setattr(LocalStorage, name, recorded(getattr(LocalStorage, name)))
    metrics = MetricsLog(run.storage, 0)
    for step in range(1, 2 * FILE_LINES + 11):
        metrics.add(line(step))
        if step % 500 == 0:
            metrics.finish()
    metrics.finish()
    metrics.close()
    first, second, third = (f"metrics/00000{n}-{after:09d}.jsonl" for n, after in ((1, 0), (2, 1000), (3, 2000)))
    assert sent == [(first, 500), (first, 1000), (second, 500), (second, 1000), (third, 10)]
    assert [line["step"] for line in run.metrics()] == list(range(1, 2 * FILE_LINES + 11))


def test_a_repeated_step_is_listed_once(run: RunFolder) -> None:
    write(run.storage, 0, 10, 20, 30, 40)
    write(run.storage, 25, 30, 50, samples_per_s=2.0)
    problems: list[str] = []
    rates = [(line["step"], line["samples_per_s"]) for line in run.metrics(problems)]
    assert rates == [(10, 1.0), (20, 1.0), (30, 2.0), (50, 2.0)]  # 40 was void when it went on from 25
    assert problems == []


def test_unavailable_storage_is_reported_and_gets_the_metrics_when_it_is_back(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsLog(run.storage, 0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        for name in ("create", "replace"):
            patch.setattr(LocalStorage, name, raising(Unavailable("away")))
        for step in range(1, FILE_LINES + 3):
            metrics.add(line(step))
            if step % 500 == 0:
                metrics.finish()
    assert "could not write metrics" in caplog.text
    assert "away" in caplog.text
    metrics.finish()
    metrics.close()
    assert [line["step"] for line in run.metrics()] == list(range(1, FILE_LINES + 3))


# --- damage ----------------------------------------------------------------------------------------------------------


def test_damaged_lines_are_skipped_and_reported(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    good = [json.dumps(line(step)).encode() for step in (10, 30)]
    odd = [{"validation": {"all": 1.0}}, {"validation": 5}, {"time": {"data": None}}, {"mfu": {"a": 1}}]
    wrong = [json.dumps(line(20) | value).encode() for value in odd]
    torn = b"\n".join([good[0], b'{"step": "20"}', b"[]", b"\xff", *wrong, good[1], b'{"step": 4'])
    run.storage.publish("metrics/000001-000000000.jsonl", torn)
    run.storage.publish("bad_rows/step-000000001.jsonl", b'{"row": 3, "reason": "undecodable"}\n{"row": "x"}\n{"ro')
    problems: list[str] = []
    assert [line["step"] for line in run.metrics(problems)] == [10, 30]
    assert run.bad_rows(problems) == [{"row": 3, "reason": "undecodable"}]
    what = "lines are damaged and left out, the first at line"
    assert problems == [
        f"{run.storage.uri}/metrics/000001-000000000.jsonl: 8 {what} 2",
        f"{run.storage.uri}/bad_rows/step-000000001.jsonl: 2 {what} 2",
    ]
    run.storage.publish("events.jsonl", b'{"event": 3}\n')
    assert run.events() == []
    assert "events.jsonl: 1 line is damaged and left out" in caplog.text


def test_an_event_after_half_a_line_is_whole(run: RunFolder) -> None:
    run.record("start")
    run.storage.publish("events.jsonl", run.storage.read("events.jsonl") + b'{"time": "20')
    run.record("end", reason="max_steps")
    assert [event["event"] for event in run.events()] == ["start", "end"]


def test_a_malformed_identity_is_reported_in_one_line(run: RunFolder) -> None:
    run.storage.publish("_run.json", b'{"format": 1, "kind": "run", "identity": 3}')
    with pytest.raises(DatasetError, match=r"_run\.json: identity: expected a mapping, got 3; restore it"):
        run.claim({"identity": {"seed": 1}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": 1}', "state: missing"),
        (b'{"format": 1, "state": {"step": "20"}}', r"state\.step: expected a valid integer, got '20'"),
        (b'{"format": 1, "state": {"step": 20}, "created": "noon"}', "noon"),
        (b'{"format": 1, "state": {"st', "not a JSON object"),
    ],
)
def test_a_damaged_newest_checkpoint_is_reported_with_the_remedy(run: RunFolder, content: bytes, message: str) -> None:
    complete(run, 10)
    run.checkpoint(20).publish("complete.json", content)
    run.checkpoint(20).publish("tensors.json", b"")
    run.checkpoint(15).publish("tensors.json", b"left over")
    folder = f"{run.storage.uri}/checkpoints/step-000000020"
    with pytest.raises(DamagedCheckpoint, match=message) as caught:
        read_state(run.checkpoint(20))
    text = str(caught.value)
    assert text.startswith(f"{folder}/complete.json: ")
    assert text.endswith(f"; delete {folder} to go on from step 10")
    assert "\n" not in text
    assert caught.value.exit_code == 2
    run.delete_checkpoint(10)
    with pytest.raises(DamagedCheckpoint, match=f"; delete {folder} to begin anew"):
        read_state(run.checkpoint(20))
    with pytest.raises(DamagedCheckpoint, match="; use another checkpoint"):  # who only reads it has nothing to delete
        read_marker(run.checkpoint(20))


def test_a_newer_sdps_checkpoint_is_not_a_damaged_one(run: RunFolder) -> None:
    run.checkpoint(20).publish("complete.json", b'{"format": 2}')
    with pytest.raises(DatasetError, match="format 2, this sdp reads 1; use a newer sdp") as caught:
        read_state(run.checkpoint(20))
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_a_deleted_checkpoint_leaves_no_folder(run: RunFolder, tmp_path: Path) -> None:
    complete(run, 10, 20)
    run.checkpoint(10).publish("worker-00000.000.bin", b"")
    run.delete_checkpoint(10)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000000020"]
