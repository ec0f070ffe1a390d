"""Batches: the pieces of a unit of prompts."""

from pathlib import Path

import pytest

from sdp.datasets.outcomes import Outcome
from sdp.datasets.units import Unit, Work
from sdp.generate.job import _Run
from sdp.sources.pieces import Piece
from tests.generate_kit import generate_config

PROMPTS = ["a", None, "b", "taken down", None, "c", "d", "e", None]


@pytest.mark.parametrize(
    ("start", "stop", "batches"),
    [(0, 9, [[0, 2], [5, 6], [7]]), (2, 7, [[2, 5], [6]]), (3, 5, [[]]), (5, 7, [[5, 6]])],
)
def test_the_pictures_of_a_unit_are_drawn_two_at_a_time_whatever_is_not_drawn_between_them(
    start: int, stop: int, batches: list[list[int]]
) -> None:
    run = _Run(generate_config(Path("out"), "run"), PROMPTS, frozenset({3}))
    items = [run.item(piece) for piece in run.pieces(Work(Unit(4, start, stop)))]
    assert [[row for row, prompt in item if isinstance(prompt, str)] for item in items] == batches
    assert [row for item in items for row, _ in item] == list(range(start, stop)), "each address once"


def test_a_batch_that_kills_its_worker_is_cut_into_its_pictures() -> None:
    run = _Run(generate_config(Path("out"), "run"), PROMPTS, frozenset())
    batch = Piece(Work(Unit(0, 2, 9)), 0, (), 1, 3)
    assert [run.item(piece) for piece in batch.narrow()] == [
        [(3, "taken down")], [(4, Outcome(4, "failed", "no_caption", attempts=0))], [(5, "c")],
    ]  # fmt: skip
    assert run.crashed(batch.narrow()[2], "killed") == ([], [Outcome(5, "failed", "crashed", "killed", attempts=2)])
