"""The actors that online training places beside the trainers, by the cluster's nodes, and the order of encoding."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp.run.placement import Placement, plan_placement
from sdp.train.online import EncoderPool, submitter
from tests.training import config


def placement(root: Path, cpus: float, *, grows: bool = False, **changes: Any) -> Placement:
    parsed = config(root, data__mode="online", encode__accelerator="cpu", **changes)
    return plan_placement(parsed.encode, parsed.transform, "out", {"CPU": cpus}, beside=2, grows=grows)


@pytest.mark.parametrize(("cpus", "encoder", "transform"), [(2, 0.0, 0.0), (3, 0.0, 1.0), (4, 0.0, 1.0), (5, 1.0, 1.0)])
def test_where_cpus_are_few_they_are_shared_rather_than_reserved(
    tmp_path: Path, cpus: float, encoder: float, transform: float
) -> None:
    placed = placement(tmp_path, cpus)
    assert (placed.encoder_cpus, placed.transform_cpus) == (encoder, transform)
    assert transform or placed.concurrency, "what reserves nothing needs another bound"


def test_encoders_of_a_cluster_reserve_a_cpu_if_one_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    placed = placement(tmp_path, 4)
    assert (placed.encoder_cpus, placed.transform_cpus) == (1.0, 1.0)


@pytest.mark.parametrize("cpus", [0, 2])
def test_where_nodes_come_on_demand_all_reserve_what_they_need(tmp_path: Path, cpus: float) -> None:
    """An actor that reserves nothing adds no node, and runs on the head beside the driver."""
    placed = placement(tmp_path, cpus, grows=True)
    assert (placed.encoder_cpus, placed.transform_cpus) == (1.0, 1.0)
    assert [place.bundle for place in placed.places] == [{"CPU": 1.0}, {"CPU": 1.0}]


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


def pool_of(*, asked_before: bool) -> EncoderPool:
    """Return a pool whose pipeline does not run."""
    images: Any = SimpleNamespace(slice_rows=64, resolution=64)
    pool = EncoderPool(images, Placement(least=1, most=4, wait_s=60.0, output="out"), None)
    pool._target = pool._serving = int(asked_before)
    return pool


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
