"""Whose turn it is: of those who wait for something, the first in order takes it, whoever came first."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """A queue before something of which there is so much; of one event loop."""

    def __init__(self, take: Callable[[], T | None]) -> None:
        """`take` takes one at once; None if there is none."""
        self._take = take
        self._waiting: list[tuple[int, int, asyncio.Future[T]]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, turn: int) -> "asyncio.Future[T]":
        """What is taken once it is there, after all who wait with an earlier turn, or with the same one for longer."""
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), place))
        return place

    def admit(self) -> None:
        """Give what there is."""
        while self._waiting:
            place = self._waiting[0][-1]
            if not place.cancelled():
                taken = self._take()
                if taken is None:
                    return
                place.set_result(taken)
            heapq.heappop(self._waiting)

    def fail(self, error: Exception) -> None:
        """Nobody gets anything any more."""
        for *_, place in self._waiting:
            if not place.cancelled():
                place.set_exception(error)
        self._waiting.clear()
