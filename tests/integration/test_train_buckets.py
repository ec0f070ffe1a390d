"""Whole runs on latents of several shapes."""

from pathlib import Path
from typing import Any

import pytest

from sdp.config.train import TrainConfig
from sdp.errors import ConfigError, DatasetError
from sdp.report.run import checkpoint_section
from sdp.storage import open_storage
from sdp.train.job import run
from sdp.train.plan import make_plan
from sdp.train.run_folder import RunFolder
from tests.latents import make_latents
from tests.training import config, ledger, tiny_inputs

ROWS = 40


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_inputs(tmp_path_factory.mktemp("buckets"), ROWS, unit_rows=20, group_rows=5, buckets=True)


def how(root: Path, **changes: Any) -> TrainConfig:
    return config(root, **{"data__batch_size": 4, "data__global_batch_size": 8, **changes})


def test_crops_of_several_shapes_are_each_trained_on_once_an_epoch_also_after_a_stop(root: Path) -> None:
    measured = {
        "log__every_steps": 2,
        "evaluate__every_steps": 2,
        "evaluate__source": str(root / "latents"),
        "evaluate__rows": 12,
    }
    run(how(root, **measured, max_steps=3))
    with pytest.raises(ConfigError, match=r"^data\.batch_size: expected 4 until epoch 0 is over, .* got 8"):
        run(how(root, data__batch_size=8, max_steps=None, max_epochs=1))
    done = run(how(root, **measured, max_steps=None, max_epochs=1))
    assert (done.state.epoch, done.state.samples) == (1, ROWS)
    assert list(ledger(done).rows(0)) == list(range(ROWS))
    assert done.checkpoint is not None
    assert checkpoint_section(open_storage(done.checkpoint)).facts["epoch_rows"] == ROWS
    lines = RunFolder(open_storage(str(root / "run"))).metrics()
    assert any(line.get("validation", {}).get("all", 0) > 0 for line in lines)


def test_what_cannot_be_dealt_in_batches_of_one_shape_is_refused_before_anything_starts(root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.global_batch_size: expected a multiple of data\.batch_size \(4\), got 6"
    ):
        make_plan(how(root, data__global_batch_size=6))
    make_latents(root / "squares", 16, unit_rows=16, vocabulary=50)
    also = [{"uri": str(root / "squares/latents"), "weight": 1.0}]
    with pytest.raises(
        DatasetError, match=r"^source\.also: expected \[\] since the crops of .*/latents.* have several shapes"
    ):
        make_plan(how(root, source__also=also))
