"""The progress line of a run."""

from typing import Any

import pytest

from sdp.config import parse
from sdp.model.checkpoints import TrainState
from sdp.train.messages import forecast_line, progress_line
from sdp.train.plan import TrainPlan

LINE: dict[str, Any] = {
    "step": 1230, "epoch": 0, "epoch_done": 0.41, "loss_smoothed": 0.1234, "samples_per_s": 812.0,
    "samples_per_s_per_worker": 203.0, "workers": 4, "learning_rate": 1e-4, "skipped": 0, "step_seconds": 0.5,
    "time": {"data": 0.015}, "gpu_hours": 8.4,
    "left_s": 1885.0, "finish_time": 1_795_392_000, "mfu": 0.421, "memory_peak": 61_000_000_000,
}  # fmt: skip


def test_the_progress_has_the_rate_the_share_of_time_that_data_takes_and_the_end() -> None:
    assert progress_line(LINE, 5000) == (
        "step 1,230 of 5,000 · epoch 0 41% · loss 0.1234 · 812 img/s (203 each) · lr 1.0e-04 · MFU 42.1% · data 3% · "
        "61.0 GB GPU memory · 8.40 GPU-hours · ETA 31:25, at Nov 23 00:00 UTC"
    )
    assert "each" not in progress_line(LINE | {"workers": 1}, None)


@pytest.mark.parametrize(
    ("state", "accelerator", "line"),
    [
        (TrainState(20, samples=160, seconds=40.0), None, "about 40 s, cost 0.04 more, at 4 img/s (its speed so far)"),
        (TrainState(0), "A100", "img/s (published, "),
        (TrainState(0), None, "not known before it runs"),
    ],
)
def test_a_dry_run_says_the_hours_and_the_cost_if_a_speed_is_known(
    state: TrainState, accelerator: str | None, line: str
) -> None:
    settings = {
        "source": {"uri": "latents"}, "output": {"uri": "run"}, "model": {"source": "model"}, "max_steps": 40,
        "scaling": {"num_workers": 2, "accelerator": accelerator}, "prices": {"trainer_hour": 1.8},
    }  # fmt: skip
    config: Any = parse("train", settings)
    plan = TrainPlan("run", 100, 100, 8, state, None, 40, None)
    assert line in forecast_line(config, plan)


def test_the_loss_shown_forgets_the_first_steps() -> None:
    state = TrainState(0)
    for step in range(110):
        state.count(16, taken=True)
        state.taken += 1
        state.smooth(1.0 if step < 40 else 0.2)
    assert state.loss == pytest.approx(0.2, abs=0.01), "a mean of the steps would be 0.49"
