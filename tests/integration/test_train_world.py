"""The start of several workers, and the end of all when one cannot start."""

import time

import pytest

from sdp.train.world import World
from tests.workers import run_workers


def failure(world: World, failing: int) -> tuple[str, float]:
    """Return a worker's error if one of them cannot begin, and the seconds until then."""
    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        world.together(lambda: 1 // (world.rank != failing))
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("failing", [0, 1])
def test_all_workers_end_with_the_reason_of_the_one_that_cannot_begin(failing: int) -> None:
    results = run_workers(2, failure, failing)
    expected = ["ZeroDivisionError: integer division or modulo by zero"] * 2
    expected[failing] = "integer division or modulo by zero"
    assert [reason for reason, _ in results] == expected
    assert max(seconds for _, seconds in results) < 30, "the process group waits for 60 s"
