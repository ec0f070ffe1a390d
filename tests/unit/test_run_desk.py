"""The desk of the pipeline: whom it blames, whom it gives no piece any more, and what ends a run. And the blocks."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sdp.errors import ModelError, SdpError, UserError
from sdp.ray import cluster
from sdp.runners.blocks import pack, unpack
from sdp.runners.desk import Desk, State, WorkerId, check_state
from sdp.runners.on_ray import room
from sdp.runners.placement import Placement
from sdp.runners.stages import PrepareStats

PLACEMENT = Placement(wait_s=60.0, output="out")
ENCODER, OTHER = WorkerId("work", "node", "one"), WorkerId("work", "other node", "other")
DIED = "its worker died each time"


def at_desk(script: Callable[[Desk], Coroutine[Any, Any, None]]) -> State:
    """Run a script at a desk and return what the desk has seen."""

    async def run() -> State:
        desk = Desk()
        await script(desk)
        return await desk.state()

    return asyncio.run(run())


def test_only_the_oldest_piece_of_a_dead_encoder_is_blamed() -> None:
    async def script(desk: Desk) -> None:
        for encoder in (ENCODER, OTHER):
            assert await desk.begin(encoder, 1) is None
            assert await desk.begin(encoder, 2) is None
        third = WorkerId("work", "node", "third")
        assert await desk.begin(third, 2) is None, "it was behind the piece that kills, twice"
        assert await desk.begin(third, 1) == DIED

    assert at_desk(script).deaths == {"prepare": 0, "work": 2}


def test_a_piece_that_is_sent_again_has_killed_the_workers_that_it_killed_before() -> None:
    async def script(desk: Desk) -> None:
        await desk.feed(1, pack(1, "a"), 1)
        assert await desk.begin(ENCODER, 1) is None
        assert await desk.stranded({"other node"}, {1}) == [1]
        await desk.feed(7, pack(7, "a"), 1)
        assert await desk.begin(OTHER, 7) is None
        assert await desk.stranded(set(), {1, 7}) == [7]
        await desk.feed(9, pack(9, "a"), 1)
        assert await desk.begin(WorkerId("prepare", "third node", "third"), 9) == "its node is gone"

    assert at_desk(script).deaths["work"] == 2


def test_a_piece_that_succeeds_under_another_number_is_blamed_no_more() -> None:
    async def script(desk: Desk) -> None:
        await desk.begin(ENCODER, 1)
        await desk.fail(ENCODER, 1, DIED)
        await desk.feed(7, pack(7, "a"), 1)
        await desk.begin(OTHER, 7)
        await desk.end(OTHER, 7)
        await desk.begin(ENCODER, 1)
        await desk.fail(ENCODER, 1, DIED)
        assert await desk.begin(OTHER, 1) is None

    at_desk(script)


def test_a_piece_that_was_done_is_not_blamed_when_it_is_done_again() -> None:
    """Its pixels or latents were lost with a node, and Ray computes them again."""

    async def script(desk: Desk) -> None:
        for _ in range(5):
            assert await desk.begin(WorkerId("prepare", "node", "a"), 1) is None
            await desk.end(WorkerId("prepare", "node", "a"), 1, PrepareStats(items=3, seconds=2.0, reading_s=0.5))

    state = at_desk(script)
    assert (state.deaths["prepare"], state.preparing, state.ready) == (0, 0, 1)
    assert state.prepared == PrepareStats(15, 10.0, 2.5)


def test_a_piece_that_fails_with_an_error_twice_is_refused_with_that_error() -> None:
    async def script(desk: Desk) -> None:
        worker = WorkerId("prepare", "node", "a")
        for _ in range(2):
            assert await desk.begin(worker, 1) is None
            await desk.fail(worker, 1, "ValueError: a tokenizer's own")
        assert await desk.begin(worker, 1) == "ValueError: a tokenizer's own"
        assert await desk.begin(worker, 2) is None

    assert at_desk(script).deaths["prepare"] == 2


def test_an_encoder_that_fails_at_a_piece_takes_its_other_piece_along_without_blame() -> None:
    async def script(desk: Desk) -> None:
        await desk.start(ENCODER, "actor")
        await desk.begin(ENCODER, 1)
        await desk.begin(ENCODER, 2)
        await desk.fail(ENCODER, 2, "RuntimeError: CUDA error")
        assert await desk.begin(OTHER, 1) is None
        assert await desk.begin(OTHER, 2) is None

    state = at_desk(script)
    assert (state.deaths["work"], state.workers, state.last["work"]) == (1, 0, "RuntimeError: CUDA error")


def test_when_a_node_goes_the_pieces_that_may_wait_for_its_encoder_are_named() -> None:
    async def script(desk: Desk) -> None:
        for encoder in (ENCODER, OTHER):
            await desk.start(encoder, f"actor {encoder[2]}")
        for encoder, number in ((ENCODER, 14), (OTHER, 20), (OTHER, 21)):
            await desk.begin(encoder, number)
            await desk.end(encoder, number)
        for number in (1, 2, 3):
            await desk.begin(WorkerId("prepare", "node", "a"), number)
            await desk.end(WorkerId("prepare", "node", "a"), number)
        await desk.begin(ENCODER, 1)
        await desk.begin(OTHER, 2)
        assert await desk.stranded({"node", "other node"}, {1, 2, 3, 14, 20}) == []
        lost = await desk.stranded({"node"}, {1, 2, 3, 14, 20})
        assert sorted(lost) == [2, 3, 20], "not what the other encoder is at, but what the lost one has not handed over"
        assert await desk.stranded({"node"}, {1, 2, 3, 14, 20}) == [], "once"

    state = at_desk(script)
    assert (state.deaths["work"], state.workers) == (1, 1)


def test_pieces_are_handed_out_until_their_transform_begins() -> None:
    async def script(desk: Desk) -> None:
        async def contents() -> list[object]:
            blocks = [await desk.piece(number) for number in (0, 1)]
            return [unpack(block) for block in blocks if block is not None]

        waiting = asyncio.ensure_future(contents())
        await asyncio.sleep(0)
        for number, piece in ((1, pack(1, "b")), (2, None), (0, pack(0, "a"))):
            await desk.feed(number, piece)
        assert await waiting == await contents() == [(0, "a"), (1, "b")]
        assert await desk.piece(2) is None
        await desk.begin(WorkerId("prepare", "node", "a"), 0)
        assert await contents() == [(0, None), (1, "b")]

    at_desk(script)


def test_an_encoder_that_died_without_a_piece_is_noticed_when_its_actor_restarts() -> None:
    async def script(desk: Desk) -> None:
        await desk.load(ENCODER, "actor")
        await desk.start(ENCODER, "actor")
        await desk.load(OTHER, "actor")
        await desk.start(OTHER, "actor")

    state = at_desk(script)
    assert (state.workers, state.deaths["work"], state.last["work"]) == (1, 1, "its process ended")


# --- how much is under way --------------------------------------------------------------------------------------------

CLUSTER = {"CPU": 1024, "object_store_memory": 64 * 30e9}
"""64 nodes, each with 16 CPUs and 30 GB of object store."""


@pytest.mark.parametrize(
    ("resources", "encoders", "piece_s", "pieces"),
    [
        (CLUSTER, 40, math.inf, 160),  # nothing is measured yet
        (CLUSTER, 40, 10.0, 240),  # 6 each: 48 GB, where all CPUs ahead would be 2,208 pieces and 444 GB
        (CLUSTER, 40, 20.0, 160),
        (CLUSTER, 40, 0.5, 2208),  # two for each CPU
        (CLUSTER, 400, 1.0, 3648),
        ({"CPU": 1024, "object_store_memory": 100e9}, 40, 1.0, 248),  # half of the stores
        ({"CPU": 2, "object_store_memory": 2e9}, 1, 1.0, 4),
        ({"CPU": 2, "object_store_memory": 1e8}, 1, 1.0, 3),  # what one encoder needs
    ],
)
def test_pieces_wait_for_a_minute_of_encoding_in_half_of_the_stores(
    resources: dict[str, float], encoders: int, piece_s: float, pieces: int
) -> None:
    assert room(resources, 201_326_592, encoders, piece_s) == pieces


# --- what ends a run --------------------------------------------------------------------------------------------------


def test_encoders_that_never_start_are_retried_a_few_times_and_reported_in_one_line() -> None:
    async def script(desk: Desk) -> None:
        for number in range(10):
            check_state(await desk.state(), PLACEMENT, 1, 1.0)
            await desk.load(WorkerId("work", "node", str(number)), "actor")
            await desk.fail(WorkerId("work", "node", str(number)), None, "RuntimeError: no kernel image")

    with pytest.raises(SdpError, match=r"^encode: 10 encoders died in a row .* RuntimeError: no kernel"):
        check_state(at_desk(script), PLACEMENT, 1, 1.0)


def test_if_no_transform_succeeds_the_run_ends_rather_than_failing_every_row() -> None:
    async def script(desk: Desk) -> None:
        for number in range(100):
            check_state(await desk.state(), PLACEMENT, 4, 1.0)
            await desk.begin(WorkerId("prepare", "node", "a"), number)
            await desk.fail(WorkerId("prepare", "node", "a"), number, "WorkerCrashedError: gone")

    with pytest.raises(SdpError, match=r"^transform: 100 transforms failed in a row, the last with WorkerCrashedError"):
        check_state(at_desk(script), PLACEMENT, 4, 1.0)


def test_one_success_between_deaths_is_enough() -> None:
    async def script(desk: Desk) -> None:
        for number in range(30):
            await desk.begin(ENCODER, number)
            await desk.fail(ENCODER, number, "killed")
            await desk.begin(OTHER, 1000 + number)
            await desk.end(OTHER, 1000 + number)

    state = at_desk(script)
    check_state(state, PLACEMENT, 1, 1.0)
    assert state.deaths["work"] == 30


def test_an_error_of_ours_ends_the_run_in_its_own_words() -> None:
    async def script(desk: Desk) -> None:
        await desk.stop(ModelError("model source x: its content has changed"))
        await desk.stop(ModelError("another"))

    with pytest.raises(ModelError, match=r"^model source x: its content has changed$"):
        check_state(at_desk(script), PLACEMENT, 1, 1.0)


@pytest.mark.parametrize(
    ("state", "placement", "patience_s", "says"),
    [
        (State(started=True), PLACEMENT, 900.0, "transform.node_labels: no node offered 1 CPU (0 of 1 ready) for a"),
        (State(), replace(PLACEMENT, least=2), 60.0, "encode.wait_s: no node offered 2 CPUs"),
    ],
)
def test_a_place_that_does_not_come_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, state: State, placement: Placement, patience_s: float, says: str
) -> None:
    monkeypatch.setattr(cluster, "nodes_with", lambda _: [])
    check_state(state, placement, 0, patience_s - 1)
    with pytest.raises(UserError) as refused:
        check_state(state, placement, 0, patience_s + 1)
    assert str(refused.value).startswith(says)
    assert "the cluster has nothing; request what it has, let it grow, or raise" in str(refused.value)


def test_an_encoder_that_loads_for_long_and_a_first_transform_that_takes_long_are_waited_for() -> None:
    check_state(State(loading=1), PLACEMENT, 0, 1e6, fed=False)
    check_state(State(started=True, preparing=3), PLACEMENT, 3, 1e6)
    check_state(State(started=True), PLACEMENT, 0, 1e6, fed=False)  # nobody has fed it yet


def test_the_desk_counts_what_happens_and_who_works() -> None:
    async def script(desk: Desk) -> None:
        await desk.load(ENCODER, "actor")
        await desk.load(OTHER, "other actor")
        await desk.start(OTHER, "other actor")
        state = await desk.state()
        assert (state.loading, state.workers) == (1, 1), "the first still loads"
        await desk.start(ENCODER, "actor")
        await desk.begin(ENCODER, 1)
        before, state = state, await desk.state()
        assert (state.loading, state.working, state.workers) == (0, 1, 2)
        assert state.events > before.events
        assert (await desk.state()).events == state.events
        await desk.load(WorkerId("work", "node", "two"), "actor")
        await desk.stranded({"other node"}, set())

    state = at_desk(script)
    assert (state.loading, state.working, state.workers, state.deaths["work"]) == (0, 0, 1, 2)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_a_block_is_one_row_that_holds_any_objects_and_arrays_where_they_lie() -> None:
    pixels = np.arange(200_000, dtype=np.uint8)
    value = {"pixels": pixels, "more": np.ones((300, 100)), "small": np.arange(3), "text": "ü"}
    block = pack((7, "head"), value)
    assert block.num_rows == 1
    head, returned = unpack(pa.ipc.open_stream(_stream(block)).read_all())
    assert head == (7, "head")
    assert all(np.array_equal(returned[name], value[name]) for name in ("pixels", "more", "small"))
    assert not returned["pixels"].flags.writeable, "it lies in the block"
    assert pack(1, None).schema == block.schema, "all blocks have one schema"


def test_one_large_array_is_packed_without_a_copy() -> None:
    pixels = np.zeros(1_000_000, np.uint8)
    assert pack(1, pixels)["data"].chunk(0).buffers()[2].address == pixels.ctypes.data


def _stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_what_workers_report_is_progress_and_outlasts_them() -> None:
    async def script(desk: Desk) -> None:
        await desk.report(ENCODER, 1)
        events = (await desk.state()).events
        await desk.report(ENCODER, 1)
        assert (await desk.state()).events == events, "nothing new"
        await desk.report(ENCODER, 2)
        assert (await desk.state()).events > events
        await desk.fail(ENCODER, None, DIED)
        await desk.report(OTHER, 3)

    assert at_desk(script).figures == {"one": 2, "other": 3}


def test_pieces_without_preparation_are_sent_again_when_the_worker_that_waits_for_them_is_lost() -> None:
    async def script() -> None:
        desk = Desk(prepares=False)
        await desk.start(ENCODER, "actor")
        for number in (0, 1, 2):
            await desk.feed(number, pack(number, "a"))
        for number in (0, 1):
            await desk.piece(number)
        assert (await desk.state()).ready == 2
        await desk.begin(ENCODER, 0)
        assert sorted(await desk.stranded(set(), {0, 1, 2})) == [0, 1], "not what nobody has asked for"

    asyncio.run(script())
