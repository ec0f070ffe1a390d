"""A folder with everything, copied elsewhere and used there."""

import shutil
from pathlib import Path

import pytest
import torch

from sdp.errors import DatasetError, UserError
from sdp.generate import job as generate
from sdp.train.job import run
from tests.generate_kit import generate_config
from tests.latents import make_latents
from tests.tiny_model import make_tiny_model
from tests.training import config


def test_a_copy_of_everything_trains_and_draws_on_where_the_original_stopped(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    here, copied = tmp_path / "here", tmp_path / "there"
    make_tiny_model(here / "model")
    make_latents(here, 40, vocabulary=50)
    run(config(here, max_steps=5, scaling__in_driver=True))  # an epoch has five steps
    drawn = generate.run(generate_config(here / "out", here / "run", model=str(here / "model"))).dataset
    shutil.copytree(here, copied, copy_function=shutil.copyfile)
    shutil.rmtree(here)

    goes_on = run(config(copied, max_steps=7, scaling__in_driver=True))
    assert goes_on.state.step == 7
    redrawn = generate.run(generate_config(copied / "out", copied / "run", model=str(copied / "model")))
    assert drawn is not None
    assert redrawn.dataset is not None
    assert redrawn.dataset.digest == drawn.digest  # by the checkpoint that it was begun with

    make_latents(tmp_path / "other", 40, unit_rows=20, vocabulary=50)
    with pytest.raises(DatasetError, match=r"not the dataset that this run was begun with"):
        run(config(copied, max_steps=9, scaling__in_driver=True, source__uri=str(tmp_path / "other/latents")))
    make_tiny_model(tmp_path / "model")
    settings = tmp_path / "model/tokenizer/tokenizer_config.json"
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(UserError, match=r"model.source: .* is another model than the run was begun with"):
        run(config(copied, max_steps=9, scaling__in_driver=True, model__source=str(tmp_path / "model")))
