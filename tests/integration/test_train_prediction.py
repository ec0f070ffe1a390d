"""The prediction type of a run: that of its starting weights, unless the configuration names another."""

import json
import shutil
from pathlib import Path

import pytest

from sdp.errors import ConfigError, ModelError
from sdp.model.checkpoints import find_checkpoint
from sdp.storage import open_storage
from sdp.train.job import run
from sdp.train.settle import settled
from tests.training import config, tiny_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return latents, a model that predicts the velocity, and a run trained to predict it."""
    root = tiny_inputs(tmp_path_factory.mktemp("prediction"), 16, unit_rows=16)
    predicting(root / "model", "v_prediction")
    shutil.copytree(root / "model", root / "other")
    predicting(root / "other", "epsilon")
    run(config(root, "velocity", max_steps=1))
    return root


def predicting(model: Path, prediction: str) -> None:
    path = model / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": prediction}))


def test_a_run_predicts_by_default_what_the_model_or_run_that_it_begins_with_predicts(inputs: Path) -> None:
    checkpoint = find_checkpoint(str(inputs / "velocity"))
    assert json.loads(checkpoint.read("config.json"))["objective"]["prediction"] == "v"
    (other,) = settled(config(inputs, model__source=str(inputs / "other")))
    assert other.objective.prediction == "epsilon"
    on = config(inputs, model__source=str(inputs / "other"), model__start_from=str(inputs / "velocity"))
    assert settled(on)[0].objective.prediction == "v"


def test_a_schedule_that_ends_without_signal_is_refused_where_the_model_predicts_noise(inputs: Path) -> None:
    asked = config(inputs, model__source=str(inputs / "other"), objective__zero_terminal_snr=True)
    with pytest.raises(
        ConfigError, match=r"^objective\.prediction: expected v while zero_terminal_snr is on, got null"
    ):
        run(asked)
    assert not open_storage(asked.output.uri).exists("_run.json")


def test_a_model_that_predicts_neither_is_refused_before_anything_starts(inputs: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(inputs / "other", tmp_path / "model"))
    predicting(model, "sample")
    with pytest.raises(ModelError, match="prediction_type: expected epsilon or v_prediction, got 'sample'"):
        run(config(inputs, "neither", model__source=str(model)))
