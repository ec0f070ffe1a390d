"""The pool's count of GPU time and its progress, without a cluster."""

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from sdp import waiting
from sdp.config import WorkersConfig
from sdp.errors import UserError
from sdp.pool import PoolFigures, WorkerPool, _PoolActor


class Worker:
    """A worker that squares a number, and refuses 13."""

    def make(self, task: int, on_rows: Callable[[int], None]) -> int:
        if task == 13:
            raise UserError("13")
        on_rows(1)
        return task * task


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and a clock that goes on by an hour whenever somebody looks."""
    hours = iter(range(1000))
    monkeypatch.setattr("sdp.pool.time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))


@pytest.mark.usefixtures("clock")
def test_a_worker_in_this_process_has_its_gpu_from_when_it_is_made_to_its_last_result() -> None:
    pool = WorkerPool("generate", "generators", WorkersConfig())
    assert list(pool.run(Worker, [2, 3])) == [4, 9]
    assert list(pool.gpu_s.values()) == [4 * 3600.0]  # a look in each task, and one after it


@pytest.mark.usefixtures("clock")
def test_an_actor_sends_the_time_that_it_has_had_its_gpu_with_each_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.pool.cluster.hide_gpus_unless_granted", lambda: None)
    monkeypatch.setattr("sdp.pool.telemetry.begin", lambda _: SimpleNamespace(process=lambda _: None))
    actor = _PoolActor(pickle.dumps(Worker), "generator", "")
    replies = [pickle.loads(actor({"task": pickle.dumps(task)})["made"]) for task in (2, 13)]
    assert replies[0][0] == 4
    assert isinstance(replies[1][0], UserError)
    assert [reply[2] for reply in replies] == [3600.0, 7200.0]
    assert replies[0][1] == replies[1][1]


def test_a_worker_on_a_cpu_has_no_gpu_hours() -> None:
    pool = WorkerPool("generate", "generators", WorkersConfig())
    assert list(pool.run(Worker, [2])) == [4]
    assert sum(pool.gpu_s.values()) == 0
    assert "GPU" not in PoolFigures(5, 1, 3600.0).summary
    assert PoolFigures(5, 2, 3600.0, 1.5).summary == "2 pictures in 1:00:00, 1.50 GPU-hours, 0.000556/s"
    assert "· 1.50 GPU-hours ·" in str(PoolFigures(5, 2, 3600.0, 1.5))


def test_a_pool_shows_its_progress_while_no_worker_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()

    def rows() -> Iterator[dict[str, bytes]]:
        assert shown.wait(20)
        yield {"made": pickle.dumps((4, "a", 0.0))}

    monkeypatch.setattr(waiting, "_STALLED_S", 1.0)
    monkeypatch.setattr(WorkerPool, "is_local", False)
    monkeypatch.setattr(WorkerPool, "_place", lambda _: None)
    monkeypatch.setattr(WorkerPool, "_dataset", lambda *_: SimpleNamespace(iter_rows=rows))
    pool = WorkerPool("generate", "generators", WorkersConfig())
    assert list(pool.run(Worker, [2], lambda done: None if done else shown.set())) == [4]
