"""The progress of jobs on pictures: what is shown while workers count, die, and have finished."""

import time
from collections.abc import Callable
from itertools import count

import pytest

from sdp.runners.desk import State
from sdp.runners.progress import Tracker


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A run of 200 pictures, shown every ten seconds."""
    ticks: Callable[[], int] = count(0, 10).__next__
    monkeypatch.setattr(time, "monotonic", ticks)
    return Tracker("generate", "out", 200, "sdp_generate_images_total")


def test_pictures_count_as_soon_as_their_workers_report_them(tracker: Tracker) -> None:
    tracker.show(State(figures={"one": 8, "another": 12}), 0)
    assert str(tracker).startswith("20 of 200 pictures · ")
    assert " · ETA " in str(tracker)
    tracker.show(State(), 64)
    assert str(tracker).startswith("64 of 200 pictures · ")


def test_what_is_done_twice_neither_exceeds_the_total_nor_counts_in_the_summary(tracker: Tracker) -> None:
    tracker.show(State(figures={"dead": 150, "another": 120}), 64)
    assert str(tracker).startswith("200 of 200 pictures · ")
    tracker.show(State(figures={"another": 120}), 130)
    assert str(tracker).startswith("200 of 200 pictures · ")
    assert tracker.summary.startswith("130 pictures in ")
