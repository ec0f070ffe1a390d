"""The order in which the pool of encoders serves trainers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sdp.errors import SdpError
from sdp.train.data.turns import Turns
from sdp.train.online import _Encoder, asker, next_encoder


def run(check: Callable[[Turns[int], list[int]], Coroutine[Any, Any, None]]) -> None:
    """Of a queue before a list of what is free."""
    free: list[int] = []
    asyncio.run(check(Turns(lambda: free.pop(0) if free else None), free))


def test_the_earliest_turn_is_first_and_of_equal_ones_who_came_first() -> None:
    async def check(queue: Turns[int], free: list[int]) -> None:
        turns = (3, 1, 2, 1, 0)
        places = [queue.join(turn) for turn in turns]
        queue.admit()
        assert not any(place.done() for place in places)
        free.extend(range(4))
        queue.admit()
        assert [place.result() if place.done() else None for place in places] == [None, 1, 3, 2, 0]
        late = queue.join(2)
        free.extend((4, 5))
        queue.admit()
        assert (late.result(), places[0].result(), len(queue)) == (4, 5, 0)

    run(check)


def test_who_has_gone_takes_nothing() -> None:
    async def check(queue: Turns[int], free: list[int]) -> None:
        gone, here = queue.join(0), queue.join(1)
        gone.cancel()
        free.append(7)
        queue.admit()
        assert here.result() == 7

    run(check)


def test_an_error_reaches_all_who_wait() -> None:
    async def check(queue: Turns[int], free: list[int]) -> None:
        places = [queue.join(turn) for turn in range(3)]
        places[1].cancel()
        queue.fail(SdpError("no place"))
        for place in (places[0], places[2]):
            with pytest.raises(SdpError, match="no place"):
                await place
        free.append(1)
        queue.admit()
        assert free == [1]

    run(check)


def test_a_trainer_s_nth_slice_comes_before_anybody_s_next() -> None:
    asked: list[tuple[str, int]] = []

    class Encode:
        def remote(self, some: str, turn: int) -> None:
            asked.append((some, turn))

    class Pool:
        encode = Encode()

    pool = Pool()
    first, second = asker(pool), asker(pool)
    for name in ("a", "b", "c"):
        first(name)  # type: ignore[arg-type]  # a slice is only handed on
    for name in ("x", "y"):
        second(name)  # type: ignore[arg-type]
    assert [some for some, _ in sorted(asked, key=lambda one: one[1])] == ["a", "x", "b", "y", "c"]


def test_slices_go_to_who_has_least_and_in_turn_where_all_have_the_same() -> None:
    encoders = [_Encoder(actor=name, ready=True) for name in "abc"]
    given = []
    for number in range(1, 7):  # each slice is done before the next one comes
        encoder = next_encoder(encoders)
        assert encoder is not None
        encoder.latest = number
        given.append(encoder.actor)
    assert given == ["a", "b", "c", "a", "b", "c"]
    encoders[0].holds.append(object())
    encoders[1].leaving = True
    encoders.append(_Encoder(actor="starting"))
    found = next_encoder(encoders)
    assert found is not None
    assert found.actor == "c"
    encoders[2].holds = [object(), object()]
    encoders[0].holds.append(object())
    assert next_encoder(encoders) is None
