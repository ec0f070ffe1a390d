"""The number of encoders that the trainers need."""

import pytest

from sdp.train.online import encoders_needed


@pytest.mark.parametrize(
    ("trainers", "encoder", "count"),
    [(4075, 102, 40), (4075, 174, 24), (100, 100, 1), (101, 100, 1), (103, 100, 2), (10, 100, 1), (1e6, 10, 64)],
)
def test_the_ceiling_of_the_ratio_is_taken_within_bounds(trainers: float, encoder: float, count: int) -> None:
    assert encoders_needed(trainers, encoder, 1, 64)[0] == count
