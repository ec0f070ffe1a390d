"""What driver and workers tell each other. It has a file of its own, since whoever runs it then loads nothing else."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Told:
    """What the workers have told."""

    attempts: int = 0
    failures: list[str] = field(default_factory=list)
    fatal: Exception | None = None
    reason: str = ""
    """Why the newest attempt ended, if no failure ended it."""

    @property
    def resizing(self) -> bool:
        """Whether the newest attempt ended in order to go on with more workers."""
        return self.reason.endswith(RESIZE)


RESIZE = "there is room for more trainers"
"""The reason of a stop that is none."""


class Board:
    """An actor between driver and workers: the newest figures one way, wishes to stop the other."""

    def __init__(self) -> None:
        self._told = Told()
        self._line: dict[str, Any] | None = None
        self._said: list[str] = []
        self._wish: str | None = None
        self._lost: str | None = None
        self._workers: list[str] = []
        """Of the newest start, as far as they have begun to train."""
        self._failures_before = 0
        """How many had been told when that began."""

    def begin(self, rank: int) -> Told:
        """A worker starts."""
        if rank == 0:
            told = self._told
            if told.resizing:
                self._told = replace(told, reason="")
                self._wish = None if self._wish == RESIZE else self._wish
            else:
                if told.attempts and len(told.failures) == self._failures_before:
                    self._add(_without_a_word(self._workers))
                self._told = replace(self._told, attempts=told.attempts + 1)
            self._workers, self._failures_before = [], len(self._told.failures)
        return self._told

    def work(self, workers: list[str]) -> Told:
        """All workers are there, and begin to train."""
        self._workers = workers
        return self._told

    def push(self, line: dict[str, Any]) -> None:
        self._line = line

    def announce(self, what: str) -> None:
        """Something to be said to a person."""
        self._said.append(what)

    def failed(self, rank: int, what: str, fatal: Exception | None) -> None:
        self._add(f"worker {rank}: {what}")
        self._told = replace(self._told, fatal=self._told.fatal or fatal)

    def _add(self, failure: str) -> None:
        self._told = replace(self._told, failures=[*self._told.failures, failure])

    def ended(self, reason: str) -> None:
        self._told = replace(self._told, reason=reason)

    def wishes(self, _step: int) -> tuple[str | None, str | None]:
        return self._wish, self._lost

    def stop(self, reason: str) -> None:
        self._wish = reason

    def lose(self, what: str) -> None:
        self._lost = what

    def line(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The newest figures, and what is to be said."""
        said, self._said = self._said, []
        return self._line, said

    def told(self) -> Told:
        """After an attempt: what its workers have told. Their figures are void by then."""
        self._line = None
        return self._told


def _without_a_word(workers: list[str]) -> str:
    """A process that is killed cannot say so, and Ray ends the others before they can."""
    if not workers:
        return "the workers ended before they had begun, and none said why"
    why = "killed, or its node lost"
    return f"none of these said why it ended ({why}): {', '.join(workers)}"
