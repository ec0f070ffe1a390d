"""The actors that online training places beside the trainers, by the cluster's nodes, and the order of encoding."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.errors import SdpError
from sdp.ray.waiting import Place
from sdp.runners.blocks import Note
from sdp.runners.desk import State
from sdp.runners.placement import Placement, plan_placement
from sdp.train.launch import _with_count
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
        fed = [pool._waiting.get_nowait() for _ in asked]
        assert pool._waiting.empty()
        for task in tasks:
            task.cancel()
        return [request.data_slice for request in fed]

    assert asyncio.run(order()) == ["a", "x", "b", "y", "c"]


def pool_of(*, asked_before: bool, board: Any = None) -> EncoderPool:
    """Return a pool whose pipeline does not run."""
    images: Any = SimpleNamespace(slice_rows=64, resolution=64)
    pool = EncoderPool(images, Placement(least=1, most=4, wait_s=60.0, output="out"), board)
    pool._serves = asked_before
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
        threading.Thread(target=pool._serve).start()
        assert await asyncio.wait_for(kept, 10) == ["rows of b"]
        pool._serves = False
        assert not await pool.has_failed()

    asyncio.run(script())


def test_all_open_requests_get_the_error_that_ends_the_pool_even_if_one_is_over(board: Any) -> None:
    async def script() -> None:
        pool = pool_of(asked_before=True, board=board)
        kept = await asked(pool, "a", "b", "c")
        for reason in ("a node is lost", "another one, too"):
            pool._fail(SdpError(reason))
        assert [str(error) for error in await asyncio.wait_for(asyncio.gather(*kept), 10)] == ["a node is lost"] * 2
        late = threading.Thread(target=pool._serve)  # with results that nobody waits for any more
        late.start()
        until(pool._waiting.empty, "all requests are fed")
        pool._serves = False
        late.join()
        assert str(pool._error) == "another one, too"

    asyncio.run(script())


@pytest.mark.parametrize(("least", "most", "cpus", "count"), [(1, 8, 1.0, 3), (2, 2, 1.0, 2), (2, 8, 0.0, 2)])
def test_as_many_encoders_start_as_have_places_beside_the_trainers(
    monkeypatch: pytest.MonkeyPatch, least: int, most: int, cpus: float, count: int
) -> None:
    asked: list[list[tuple[int, int]]] = []

    def wait_for(_: str, places: list[Place], *rest: Any, **more: Any) -> list[int]:  # noqa: ARG001
        asked.append([(place.least, place.most) for place in places])
        return [2, 3]

    monkeypatch.setattr("sdp.train.launch.wait_for", wait_for)
    trainers, lease = Place("scaling", {"CPU": 1.0}, 2, 2), SimpleNamespace(check=None)
    placed = _with_count(Placement(least=least, most=most, cpus=cpus), trainers, lease)  # type: ignore[arg-type]
    assert (placed.least, placed.most) == (count, count)
    assert asked == [[(2, 2), (1, 8)]] * (count == 3)
