"""The start of an attempt, and the wait for its first trainer."""

from typing import Any

import pytest
import torch.distributed as dist
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from sdp.ray import cluster
from sdp.ray.waiting import Stall
from sdp.train import group, launch


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> tuple[Stall, list[str]]:
    lines: list[str] = []

    def give_up(message: str) -> None:
        raise SystemExit(message)

    monkeypatch.setattr(cluster, "give_up", give_up)
    return Stall("train", [], notify=lines.append), lines


def test_trainers_that_have_places_but_never_run_end_the_job(
    stall: tuple[Stall, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "own_groups", lambda: {"a": "PENDING"})
    start, lines = stall
    for now in range(1000):
        launch._check_start(start, now)
    assert lines[0] == "train: no progress for 1:00 (no trainer runs yet; their places are in use)"
    monkeypatch.setattr(launch, "own_groups", lambda: {"a": "CREATED"})
    for now in range(1000, 1330):
        launch._check_start(start, now)
    assert lines[-1].endswith("(no trainer runs yet; all have places)")
    with pytest.raises(SystemExit, match=r"^train: no trainer ran within 5:00; run the same command again"):
        launch._check_start(start, 1330)


def test_collectives_time_out_after_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: made.update(how, backend=backend))
    for cuda, backend in ((True, "cpu:gloo,cuda:nccl"), (False, "gloo")):
        group.join(1, 2, "tcp://a:1", cuda)
        assert (made["backend"], made["init_method"], made["rank"], made["world_size"]) == (backend, "tcp://a:1", 1, 2)
        assert made["timeout"].total_seconds() == 1920


def test_the_cause_of_an_attempt_that_failed_is_ray_s_own_words_without_its_tables() -> None:
    died = "The actor died before finishing this task.\n\tpid: 7\nThe actor is dead because its process has died."
    lost = WorkerHealthCheckFailedError("A check failed.\nWorker info: Worker(\n  pid=7\n)", RuntimeError(died))
    controller = ControllerError(RuntimeError("At least one of the worker actors failed to initialize."))
    assert launch._cause(WorkerGroupError("[Rank 1 Error Snippet]", {1: lost})) == (
        "The actor is dead because its process has died."
    )
    assert launch._cause(controller) == "At least one of the worker actors failed to initialize."
