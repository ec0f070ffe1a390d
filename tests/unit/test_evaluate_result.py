"""The entries of evaluation.json, without a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sdp.evaluate.result import loss_figures
from sdp.storage import open_storage


@pytest.mark.parametrize(
    ("checkpoint", "run"),
    [("run/checkpoints/step-000000010", "run"), ("run/phase2/checkpoints/step-000000010", "run/phase2"), ("copy", "")],
)
def test_a_loss_names_the_run_of_its_checkpoint_unless_it_was_copied_out_of_one(
    checkpoint: str, run: str, tmp_path: Path
) -> None:
    storage = open_storage(str(tmp_path / checkpoint))
    spec = SimpleNamespace(checkpoint=storage, ema=True, dataset="latents", settings=SimpleNamespace(source=None))
    loss = SimpleNamespace(mean=0.5, error=0.1, rows=8, by_timestep=[0.5])
    entry = loss_figures(cast(Any, spec), cast(Any, loss))
    assert entry["checkpoint"] == str(tmp_path / checkpoint)
    assert entry["run"] == (str(tmp_path / run) if run else "")
    assert (entry["weights"], entry["held_out_of_training"]) == ("ema", True)
