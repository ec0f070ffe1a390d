"""The cost of a stranger's input, and of a dataset's units, grows no faster than they do; `make fuzz` tries more."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import growth
from tests.growth import Case, problem
from tests.programs import ended


@pytest.mark.slow
def test_four_times_the_input_costs_at_most_five_times_as_much() -> None:
    result = ended([sys.executable, "-m", "tests.growth"], timeout=590)
    assert (result.stdout, result.returncode) == ("", 0), result.stderr


def test_quadratic_work_is_noticed_and_a_single_step_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "FLOOR_S", 0.01)
    monkeypatch.setattr(growth, "FLOOR_BYTES", 1 << 20)

    def slow(pieces: int, _: Path) -> Callable[[], object]:
        return lambda: sum(1 for _ in range(pieces) for _ in range(pieces))

    def large(pieces: int, _: Path) -> Callable[[], object]:
        return lambda: len(b"x" * pieces**2)

    def dearer_once(pieces: int, _: Path) -> Callable[[], object]:
        return lambda: sum(1 for _ in range(3_000_000 if pieces > 800 else 1_000))

    assert "CPU time grew" in problem(Case("slow", 600, slow), 600)
    assert "memory from" in problem(Case("large", 800, large), 800)
    assert growth._step(Case("dearer once", 800, dearer_once), 800)
    assert problem(Case("dearer once", 800, dearer_once), 800) == ""
