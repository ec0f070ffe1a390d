"""The start of an attempt, and the wait for its first trainer."""

import os
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.callbacks.accelerators import _share_cuda_visible_devices
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution import context, train_fn_utils
from ray.train.v2._internal.execution.context import DistributedContext, TrainContext
from ray.train.v2._internal.execution.worker_group import ActorMetadata, Worker, WorkerGroup
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup

from sdp.ray import cluster, internals
from sdp.ray.waiting import Stall
from sdp.train import group, launch


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> tuple[Stall, list[str]]:
    lines: list[str] = []

    monkeypatch.setattr(cluster, "give_up", sys.exit)
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


def test_trainers_that_run_and_have_no_figures_yet_are_reported_and_not_ended(stall: tuple[Stall, list[str]]) -> None:
    running, lines = stall
    for now in range(10, 1800):
        launch._check_first_steps(running, now, 0)
    assert lines[0] == "train: no progress for 1:00 (trainers load, compile or do their first steps)"
    assert len(lines) == 58
    lines.clear()
    for now in range(1800, 1850):
        launch._check_first_steps(running, now, 1)  # a graph was compiled
    assert not lines


def test_collectives_time_out_after_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: made.update(how, backend=backend))
    chosen: list[str] = []
    monkeypatch.setattr(group, "choose_interface", chosen.append)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    group.join(1, 2, "tcp://a:1", cuda=False)
    assert chosen == ["10.0.0.1"]
    assert (made["backend"], made["init_method"], made["rank"], made["world_size"]) == ("gloo", "tcp://a:1", 1, 2)
    assert made["timeout"].total_seconds() == 1920
    assert made["device_id"] is None


class Process:
    """A worker's process, as Ray Train's worker group calls it: each call has its environment and its context."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.execute = patch, self
        self.visible = ""
        self.context: DistributedContext | None = None

    def options(self, **_: Any) -> "Process":
        return self

    def remote(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.patch.setenv("CUDA_VISIBLE_DEVICES", self.visible)
        self.patch.setattr(context, "_train_context", TrainContext(None, self.context, *[None] * 5))
        result = work(*args, **options)
        self.visible = os.environ["CUDA_VISIBLE_DEVICES"]
        return result


@pytest.mark.parametrize("gpus", [(5, 8), (8, 5), (3, 2), (1, 8), (8, 8)])
def test_nccl_uses_the_gpu_that_ray_has_granted_to_the_worker(
    gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, dict[str, Any]] = {}
    chosen: list[torch.device] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **how: made.update({how["rank"]: how | {"backend": backend}})
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(group, "address", lambda: "tcp://a:1")
    monkeypatch.setattr(group, "choose_interface", lambda _: None)
    monkeypatch.setattr(ray, "get", lambda results: results)
    monkeypatch.setattr(train_fn_utils, "_train_fn_utils", train_fn_utils.DistributedTrainFnUtils())
    places = [(f"10.0.0.{node}", gpu) for node, count in enumerate(gpus) for gpu in range(count)]
    Random(1).shuffle(places)  # Ray starts them in any order
    actors = [(Process(monkeypatch), ActorMetadata(ip, ip, ip, 1, {"GPU": [str(gpu)]})) for ip, gpu in places]
    workers = WorkerGroup._assign_worker_ranks([Worker(*actor, {"GPU": 1}) for actor in actors])
    for worker in workers:
        worker.actor.context = worker.distributed_context
    _share_cuda_visible_devices(workers)
    config = internals.process_group(group, gpu=True)
    config.backend_cls().on_start(ReplicaGroup(workers, {"GPU": 1}), config)
    assert sorted(made) == list(range(sum(gpus)))
    for rank, worker in enumerate(workers):
        device = made[rank]["device_id"]
        assert (made[rank]["backend"], device.type) == ("cpu:gloo,cuda:nccl", "cuda")
        assert worker.actor.visible.split(",")[device.index] == worker.metadata.gpu_ids[0]
        assert chosen[rank] == device
    indexes = [made[rank]["device_id"].index for rank in range(sum(gpus))]
    assert indexes in ([*range(gpus[0]), *range(gpus[1])], [*range(gpus[1]), *range(gpus[0])])


def test_the_cause_of_an_attempt_that_failed_is_ray_s_own_words_without_its_tables() -> None:
    end = "The actor is dead because its process has died."
    died = RuntimeError(f"The actor died before finishing this task.\n\tpid: 7\n{end}")
    lost = WorkerHealthCheckFailedError("A check failed.\nWorker info: Worker(\n  pid=7\n)", died)
    controller = ControllerError(RuntimeError("At least one of the worker actors failed to initialize."))
    assert launch._cause(WorkerGroupError("[Rank 1 Error Snippet]", {1: lost})) == end
    assert launch._cause(controller) == "At least one of the worker actors failed to initialize."
