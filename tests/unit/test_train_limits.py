"""The limits of a run: which of them ends it, and in what words."""

from pathlib import Path
from typing import Any

import pytest

from sdp.model.checkpoints import TrainState
from sdp.train.limits import last_step, reached_limit, used_up_budget
from tests.training import config


@pytest.mark.parametrize(
    ("limits", "state", "reason"),
    [
        ({"max_steps": 5}, TrainState(step=4), None),
        ({"max_steps": 5}, TrainState(step=5), "max_steps: 5 steps"),
        ({"max_steps": 9, "max_epochs": 2}, TrainState(0, epoch=2), "max_epochs: 2 passes over the data"),
        ({"max_samples": 10}, TrainState(0, samples=12), "max_samples: 12 samples"),
    ],
)
def test_the_limit_that_is_reached_is_named(
    tmp_path: Path, limits: dict[str, Any], state: TrainState, reason: str | None
) -> None:
    assert reached_limit(config(tmp_path, **limits), state) == reason


def test_a_used_up_budget_is_named_with_its_remedy(tmp_path: Path) -> None:
    limited = config(tmp_path, max_hours=2.0, max_cost=5.0, prices__trainer_hour=1.0)
    assert used_up_budget(limited, TrainState(0, seconds=7199.0, cost=4.9)) is None
    assert used_up_budget(limited, TrainState(0, seconds=7200.0)) == "max_hours is used up; raise it to continue"
    assert used_up_budget(limited, TrainState(0, cost=5.0)) == "max_cost is used up; raise it to continue"


def test_the_last_step_is_that_of_the_first_limit(tmp_path: Path) -> None:
    state = TrainState(step=3, epoch=1, position=8)
    assert last_step(config(tmp_path, max_steps=100, max_epochs=3), state, rows=20, batch=8) == 3 + 2 + 3
    assert last_step(config(tmp_path, max_steps=5, max_epochs=3), state, rows=20, batch=8) == 5
