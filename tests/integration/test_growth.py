"""The cost of a stranger's input grows no faster than the input; `make fuzz` tries larger ones."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.growth import Case, cases, problem


@pytest.mark.parametrize("name", [case.name for case in cases()])
def test_four_times_the_input_costs_at_most_five_times_as_much(name: str) -> None:
    result = subprocess.run([sys.executable, "-m", "tests.growth", name], capture_output=True, text=True, timeout=300)
    assert (result.stdout, result.returncode) == ("", 0), result.stderr


def test_quadratic_time_and_memory_are_noticed() -> None:
    def slow(pieces: int, _: Path) -> Callable[[], object]:
        return lambda: sum(1 for _ in range(pieces) for _ in range(pieces))

    def large(pieces: int, _: Path) -> Callable[[], object]:
        return lambda: len(b"x" * pieces**2)

    assert "CPU time grew" in problem(Case("slow", 1_500, slow), 1_500)
    assert "memory from" in problem(Case("large", 6_000, large), 6_000)
