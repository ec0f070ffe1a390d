"""The limits of a run: which of them ends it, and in what words."""

import math
from pathlib import Path
from typing import Any

import pytest

from sdp.model.checkpoints import TrainState
from sdp.train.limits import is_due, last_step, seconds_left
from sdp.train.settle import with_hours
from tests.training import config


def test_money_becomes_hours_of_all_trainers_and_encoders(tmp_path: Path) -> None:
    of_images = {"data__mode": "online", "encode__num_workers": {"min": 1, "max": 4}}
    prices = {"prices__trainer_hour": 10.0, "prices__encoder_hour": 5.0}
    paid = config(tmp_path, max_cost=100.0, scaling__num_workers={"min": 1, "max": 8}, **prices)
    assert with_hours(paid, TrainState(0)).max_hours == 100 / (8 * 10)
    assert with_hours(paid, TrainState(0, trainer_hours=6.0)).max_hours == (100 - 60) / 80
    encoded = paid.replaced(**{k: v for k, v in config(tmp_path, **of_images) if k in ("data", "encode")})
    assert with_hours(encoded, TrainState(0, encoder_hours=2.0)).max_hours == (100 - 10) / (8 * 10 + 4 * 5)
    assert with_hours(paid.replaced(max_hours=0.5), TrainState(0, seconds=900.0)).max_hours == 0.25
    assert with_hours(config(tmp_path), TrainState(0, seconds=900.0)).max_hours is None


@pytest.mark.parametrize(
    ("step", "limit", "due"), [(100, 400, True), (150, 150, False), (30, 30, True), (30, 40, False), (200, 200, True)]
)
def test_what_is_done_every_so_often_is_done_once_in_a_short_run(
    tmp_path: Path, step: int, limit: int, due: bool
) -> None:
    assert is_due(config(tmp_path, max_steps=limit), TrainState(step), 100) is due


def left(tmp_path: Path, last: int | None = 1100, hours: float = 0.0, **limits: Any) -> float:
    """Return the seconds left at step 100 of batches of 10, at 20 samples a second."""
    state = TrainState(step=100, samples=1000, seconds=hours * 3600)
    return seconds_left(config(tmp_path, **limits), state, last, 10, 20.0)


def test_the_end_is_forecast_from_the_first_limit(tmp_path: Path) -> None:
    assert left(tmp_path) == 500
    assert left(tmp_path, hours=1, max_hours=1.01) == pytest.approx(36)
    assert left(tmp_path, hours=2, max_hours=1) == 0
    assert math.isinf(left(tmp_path, last=None))
    assert left(tmp_path, last=50) == 0


def test_the_last_step_is_that_of_the_first_limit(tmp_path: Path) -> None:
    state = TrainState(step=3, epoch=1, position=8)
    assert last_step(config(tmp_path, max_steps=100, max_epochs=3), state, rows=20, batch=8) == 3 + 2 + 3
    assert last_step(config(tmp_path, max_steps=5, max_epochs=3), state, rows=20, batch=8) == 5


def test_hours_are_those_of_all_trainers_and_encoders_and_gpu_hours_of_those_with_a_gpu() -> None:
    state = TrainState(0)
    state.bill(1800, trainers=4, gpu=True)
    state.bill(3600, encoders=3, gpu=False)
    assert (state.trainer_hours, state.encoder_hours, state.gpu_hours) == (2, 3, 2)
