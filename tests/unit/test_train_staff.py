"""The actors that online training places beside the trainers, by the cluster's nodes, and the order of encoding."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.errors import SdpError
from sdp.runners.blocks import Note
from sdp.runners.desk import State
from sdp.runners.placement import Placement, plan_placement
from sdp.train.online import EncoderPool, submitter
from tests.training import config
from tests.waiting import until


def placement(root: Path, cpus: float, *, grows: bool = False, **changes: Any) -> Placement:
    parsed = config(root, data__mode="online", encode__accelerator="cpu", **changes)
    return plan_placement(parsed.encode, parsed.transform, "out", {"CPU": cpus}, beside=2, grows=grows)


@pytest.mark.parametrize(("cpus", "encoder", "transform"), [(2, 0.0, 0.0), (3, 0.0, 1.0), (4, 0.0, 1.0), (5, 1.0, 1.0)])
def test_where_cpus_are_few_they_are_shared_rather_than_reserved(
    tmp_path: Path, cpus: float, encoder: float, transform: float
) -> None:
    placed = placement(tmp_path, cpus)
    assert (placed.cpus, placed.prepare_cpus) == (encoder, transform)
    assert transform or placed.prepare_concurrency, "what reserves nothing needs another bound"


def test_encoders_of_a_cluster_reserve_a_cpu_if_one_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    placed = placement(tmp_path, 4)
    assert (placed.cpus, placed.prepare_cpus) == (1.0, 1.0)


@pytest.mark.parametrize("cpus", [0, 2])
def test_where_nodes_come_on_demand_all_reserve_what_they_need(tmp_path: Path, cpus: float) -> None:
    """An actor that reserves nothing adds no node, and runs on the head beside the driver."""
    placed = placement(tmp_path, cpus, grows=True)
    assert (placed.cpus, placed.prepare_cpus) == (1.0, 1.0)
    assert [place.bundle for place in placed.places(prepares=True)] == [{"CPU": 1.0}, {"CPU": 1.0}]


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_a_trainer_s_nth_slice_is_fed_before_anybody_s_next() -> None:
    asked: list[tuple[str, int]] = []
    remote = SimpleNamespace(encode=SimpleNamespace(remote=lambda data_slice, turn: asked.append((data_slice, turn))))
    first, second = submitter(remote), submitter(remote)
    for name in ("a", "b", "c"):
        first(name)  # type: ignore[arg-type]  # a slice is only handed on
    for name in ("x", "y"):
        second(name)  # type: ignore[arg-type]

    async def order() -> list[Any]:
        pool = pool_of(asked_before=True)
        tasks = [asyncio.ensure_future(pool.encode(data_slice, turn)) for data_slice, turn in asked]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        fed = [pool._next() for _ in range(6)]
        for task in tasks:
            task.cancel()
        return [request.data_slice for request in fed if request is not None]

    assert asyncio.run(order()) == ["a", "x", "b", "y", "c"]


def pool_of(*, asked_before: bool, board: Any = None) -> EncoderPool:
    """Return a pool whose pipeline does not run."""
    images: Any = SimpleNamespace(slice_rows=64, resolution=64)
    pool = EncoderPool(images, Placement(least=1, most=4, wait_s=60.0, output="out"), board)
    pool._target = pool._serving = int(asked_before)
    return pool


class Pipeline:
    """A pipeline that encodes every slice at once."""

    full = False

    def __init__(self, *_: object) -> None:
        self._fed: list[Any] = []

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def feed(self, request: Any, _: object) -> None:
        self._fed.append(request)

    def results(self, _: float) -> list[tuple[Any, Note, str]]:
        results, self._fed = [(request, Note(), f"rows of {request.data_slice}") for request in self._fed], []
        return results

    def state(self) -> State:
        return State()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sdp.train.online.OnRay", Pipeline)
    return SimpleNamespace(announce=SimpleNamespace(remote=None))


async def asked(pool: EncoderPool, *slices: Any) -> list[Any]:
    """Ask for slices, and give the first one up."""
    tasks = [asyncio.ensure_future(pool.encode(data_slice, turn)) for turn, data_slice in enumerate(slices)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    return tasks[1:]


def test_a_request_that_is_given_up_does_not_end_the_pipeline(board: Any) -> None:
    async def script() -> None:
        pool = pool_of(asked_before=True, board=board)
        (kept,) = await asked(pool, "a", "b")
        pool._start(1)
        assert await asyncio.wait_for(kept, 10) == ["rows of b"]
        pool._serving = pool._target = 0
        assert not await pool.has_failed()

    asyncio.run(script())


def test_all_open_requests_get_the_error_that_ends_the_pool_even_if_one_is_over(board: Any) -> None:
    async def script() -> None:
        pool = pool_of(asked_before=True, board=board)
        kept = await asked(pool, "a", "b", "c")
        for reason in ("a node is lost", "another one, too"):
            pool._fail(SdpError(reason), 1)
        assert [str(error) for error in await asyncio.wait_for(asyncio.gather(*kept), 10)] == ["a node is lost"] * 2
        late = threading.Thread(target=pool._serve, args=(1,))  # with results that nobody waits for any more
        late.start()
        until(pool._waiting.empty, "all requests are fed")
        pool._serving = pool._target = 0
        late.join()
        assert str(pool._error) == "another one, too"

    asyncio.run(script())


def test_the_number_of_encoders_is_chosen_once_for_a_number_of_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.train.online._CALIBRATE_S", -1.0)
    served: list[int] = []
    monkeypatch.setattr(EncoderPool, "_start", lambda _, encoders: served.append(encoders))

    async def script() -> None:
        pool = pool_of(asked_before=True)
        await pool.pace(2, 0, 300, 1.0)
        assert not served, "an encoder's pace is not known yet"
        pool._warm_rows, pool._warm_busy_s = 100, 1.0
        for samples in (300, 900):
            await pool.pace(2, 0, samples, 1.0)
        await pool.pace(1, 0, 150, 1.0)
        reasons = (await pool.status())[1]
        assert [reason.partition(":")[0] for reason in reasons] == ["3 encoders", "2 encoders"]

    asyncio.run(script())
    assert served == [3, 2]
