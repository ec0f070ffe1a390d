"""The runner in this process, for stages that prepare nothing."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from sdp.errors import ModelError, SdpError
from sdp.runners.blocks import Note
from sdp.runners.here import Here
from tests.waiting import until


@dataclass
class Halves:
    """A worker, and stages that halve even numbers."""

    done: int = 0
    tried: Counter[int] = field(default_factory=Counter)
    go_on: threading.Event = field(default_factory=threading.Event)

    def load(self) -> "Halves":
        return self

    def figures(self) -> int:
        return self.done

    def work(self, worker: "Halves", value: int) -> int:
        self.tried[value] += 1
        if value < 0:
            raise ModelError("no negative numbers")
        if value % 2:
            raise ArithmeticError(f"{value} is odd")
        worker.done += 1
        assert self.go_on.wait(20)
        return value // 2


def results_of(runner: Here, *items: int) -> list[tuple[Any, Note, Any]]:
    results = list[tuple[Any, Note, Any]]()
    for item in items:
        runner.feed(str(item), item)
    deadline = time.monotonic() + 20
    while len(results) < len(items) and time.monotonic() < deadline:
        results += runner.results(0.5)
    return results


def test_a_worker_is_asked_for_its_figures_while_it_works() -> None:
    stages = Halves()
    with Here(stages, "generate", "generator", at_once=1) as runner:
        runner.feed("key", 4)
        until(lambda: runner.state().figures == {"": 1}, "the worker's figures")
        assert list(runner.results(0)) == []
        stages.go_on.set()
        assert [(key, rows) for key, _, rows in runner.results(20)] == [("key", 2)]


def test_an_item_that_fails_twice_comes_back_without_rows_and_the_others_are_done() -> None:
    stages = Halves()
    stages.go_on.set()
    with Here(stages, "generate", "generator", at_once=1) as runner:
        results = {key: (note.died, rows) for key, note, rows in results_of(runner, 2, 7, 4)}
    assert results == {"2": (None, 1), "7": ("ArithmeticError: 7 is odd", None), "4": (None, 2)}
    assert stages.tried == {2: 1, 7: 2, 4: 1}


def test_an_error_of_ours_ends_the_job_at_once_and_so_do_ten_others_in_a_row() -> None:
    stages = Halves()
    with Here(stages, "generate", "generator", at_once=1) as runner:
        with pytest.raises(ModelError, match=r"^no negative numbers$"):
            results_of(runner, -1)
        with pytest.raises(SdpError, match=r"^10 pieces failed in a row, the last with ArithmeticError: 9 is odd$"):
            results_of(runner, 1, 3, 5, 7, 9)
