"""The number of encoders that the trainers need."""

import pytest

from sdp.train.online import encoders_needed


@pytest.mark.parametrize(
    ("trainers", "encoder", "count"),
    [(4075, 102, 40), (4075, 174, 24), (100, 100, 1), (101, 100, 1), (103, 100, 2), (10, 100, 1), (1e6, 10, 64)],
)
def test_the_ceiling_of_the_ratio_is_taken_within_bounds(trainers: float, encoder: float, count: int) -> None:
    assert encoders_needed(trainers, encoder, 1, 64)[0] == count


def test_the_reason_has_both_paces_and_the_bound_that_holds() -> None:
    assert encoders_needed(350, 100, 1, 8) == (
        4,
        "4 encoders: the trainers take 350.0 img/s, one encoder makes 100.0, which is 3.50 encoders",
    )
    assert "(encode.num_workers.max is 8)" in encoders_needed(10_000, 100, 1, 8)[1]
    assert "(encode.num_workers.min is 2)" in encoders_needed(100, 100, 2, 8)[1]
