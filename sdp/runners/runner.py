"""A runner: takes pieces of work through a job's stages, in this process (`here`) or on Ray Data (`on_ray`).

    with runner:
        runner.feed(key, item)
        for key, note, rows in runner.results(timeout_s): ...
        runner.task(write, [rows, ...], *arguments)

Results come in the order in which they finish. Rows stay where they were made until a task, or `value`, fetches them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

from sdp.runners.blocks import Note
from sdp.runners.desk import State

TASKS = 4
"""Tasks that run at once."""

Result = tuple[Any, Note, Any]
"""A piece's key, the note on it, and its rows, or a reference to them."""


class RowsLost(Exception):
    """Rows were lost with their node before a task, or the driver, had them."""


class Runner(Protocol):
    """Stages under way, for one driver thread. It is a context manager, and ends with its block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, *_: object) -> None: ...

    @property
    def full(self) -> bool:
        """True while there is no room for further pieces."""

    def feed(self, key: Any, item: Any) -> None:
        """Send an item through the stages; its result is returned with the key, which is not sent."""

    def results(self, timeout_s: float) -> Iterator[Result]:
        """Wait up to `timeout_s` for a result, then yield every result that is ready."""

    def state(self) -> State:
        """Return the present state; raise the error that ends the run, if there is one."""

    def task(self, function: Callable[..., Any], pieces: Sequence[Any], *arguments: Any) -> Future[Any]:
        """Begin `function(stages, rows of the pieces, *arguments)`; its future may raise RowsLost.

        A piece is what `results` has yielded, or rows that no worker has made.
        """

    def value(self, rows: Any) -> Any:
        """Return rows themselves; raise RowsLost if their node has gone."""


class Feed:
    """Keeps a runner fed, and counts what is under way."""

    def __init__(self, runner: Runner, next_item: Callable[[], tuple[Any, Any] | None]) -> None:
        """`next_item` returns the next key and item; None if there is none now."""
        self._runner, self._next = runner, next_item
        self.under_way = 0

    def results(self, wait_s: float) -> Iterator[Result]:
        """Feed the runner until it is full, wait for a result, and yield every one that is ready."""
        while not self._runner.full and (item := self._next()) is not None:
            self.under_way += 1
            self._runner.feed(*item)
        for result in self._runner.results(wait_s if self.under_way else 0):
            self.under_way -= 1
            yield result
