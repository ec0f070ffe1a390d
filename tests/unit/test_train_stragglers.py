"""The slowest worker, and its mention in the progress."""

from typing import Any

import pytest

from sdp.model.checkpoints import TrainState
from sdp.train.callbacks.stragglers import behind, slowest
from sdp.train.messages import progress_line
from sdp.train.plan import TrainPlan


def test_the_slowest_is_compared_with_the_others_and_its_part_is_where_it_loses_most() -> None:
    result = slowest([[0.01, 0.01, 0.10], [0.06, 0.01, 0.11], [0.01, 0.01, 0.10], [0.01, 0.01, 0.12]])
    assert result == {"rank": 1, "seconds": 0.18, "others": 0.12, "part": "data"}
    assert behind(result) == pytest.approx(0.5)


def test_of_two_the_other_is_the_measure() -> None:
    result = slowest([[0.0, 0.0, 0.1], [0.0, 0.0, 0.3]])
    assert (result["rank"], result["part"]) == (1, "forward")
    assert behind(result) == pytest.approx(2.0)


def test_nothing_is_behind_where_nobody_took_any_time() -> None:
    assert behind(slowest([[0.0] * 3, [0.0] * 3])) == 0.0


LINE: dict[str, Any] = {
    "step": 1230, "epoch": 0, "epoch_done": 0.41, "loss_smoothed": 0.1234, "samples_per_s": 812.0,
    "samples_per_s_per_worker": 203.0, "workers": 4, "learning_rate": 1e-4, "skipped": 0, "step_seconds": 0.5,
    "time": {"data": 0.015}, "gpu_hours": 8.4,
    "left_s": 1885.0, "finish_time": 1_795_392_000, "mfu": 0.421, "memory_peak": 61_000_000_000,
    "slowest": {"rank": 3, "host": "node-7", "seconds": 0.2, "others": 0.16, "part": "data"},
}  # fmt: skip
PLAN = TrainPlan("run", 10_000, 10_000, 406, TrainState(0), None, 5000, None)


def test_the_progress_names_a_worker_that_is_well_behind_and_the_share_of_time_that_data_takes() -> None:
    assert progress_line(LINE, PLAN) == (
        "step 1,230 of 5,000 · epoch 0 41% · loss 0.1234 · 812 img/s (203 each) · lr 1.0e-04 · MFU 42.1% · data 3% · "
        "61.0 GB GPU memory · worker 3 on node-7 25% slower (data) · 8.40 GPU-hours · "
        "ETA 31:25, at Nov 23 00:00 UTC"
    )


def test_a_slightly_slower_worker_is_not_reported() -> None:
    line = LINE | {"slowest": LINE["slowest"] | {"seconds": 0.17}, "workers": 1}
    text = progress_line(line, PLAN)
    assert "slower" not in text
    assert "each" not in text
