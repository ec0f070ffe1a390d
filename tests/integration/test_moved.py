"""A folder with everything, copied elsewhere and used there."""

import shutil
from pathlib import Path

import pytest
import torch

from sdp.datasets.manifest import finish
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.source import freeze_source
from sdp.errors import DatasetError, UserError
from sdp.generate import job as generate
from sdp.report.sections import describe
from sdp.storage import list_source, open_storage
from sdp.train.job import run
from tests.generate_kit import generate_config
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)
from tests.kit import not_none, write_images_part, write_source
from tests.latents import make_latents
from tests.tiny_model import make_tiny_model
from tests.training import config, tiny_inputs


def test_a_copy_of_everything_trains_and_draws_on_where_the_original_stopped(tmp_path: Path) -> None:
    here, copied = tiny_inputs(tmp_path / "here"), tmp_path / "there"
    run(config(here, max_steps=5))  # an epoch has five steps
    drawn = generate.run(generate_config(here / "out", here / "run", model=str(here / "model")))
    shutil.copytree(here, copied, copy_function=shutil.copyfile)
    shutil.rmtree(here)

    goes_on = run(config(copied, max_steps=7))
    assert goes_on.state.step == 7
    redrawn = generate.run(generate_config(copied / "out", copied / "run", model=str(copied / "model")))
    assert not_none(redrawn).digest == not_none(drawn).digest  # by the checkpoint that it was begun with

    make_latents(tmp_path / "other", 40, unit_rows=20, vocabulary=50)
    with pytest.raises(DatasetError, match=r"other/latents: not the dataset that this run began with"):
        run(config(copied, max_steps=9, source__uri=str(tmp_path / "other/latents")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DatasetError, match=r"/nothing: not a dataset of sdp"):
        run(config(copied, max_steps=9, source__uri=str(tmp_path / "nothing")))
    make_tiny_model(tmp_path / "model")
    settings = tmp_path / "model/tokenizer/tokenizer_config.json"
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(UserError, match=r"model.source: .* is another model than the run began with"):
        run(config(copied, max_steps=9, model__source=str(tmp_path / "model")))


def begin_download(root: str) -> Output:
    """Return what `sdp download` of ROOT/metadata into ROOT/images has and lacks."""
    output = open_output(open_storage(f"{root}/images"), Head("images", 10, False, {"image.size": 256}))
    return freeze_source(output, list_source(f"{root}/metadata"), ["URL", "TEXT"], uri=f"{root}/metadata")


def copy(source: str, target: str) -> None:
    storage, copied = open_storage(source), open_storage(target)
    for file in storage.list():
        copied.publish(file.path, storage.read(file.path))


@pytest.mark.needs("versitygw")
def test_a_folder_goes_on_in_a_bucket_and_then_in_another_bucket(s3_env: Gateway, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model")
    here = tmp_path / "here"
    write_source(here / "metadata", [("a.parquet", 25), ("b.parquet", 17)])
    output = begin_download(str(here))
    for work in output.pending():
        write_images_part(output.storage, work)
    images = finish(output, input={"uri": str(here / "metadata")})
    make_latents(here, 40, vocabulary=50)

    def train(root: str, steps: int) -> int:
        folders = {"source__uri": f"{root}/latents", "output__uri": f"{root}/run"}
        return run(config(tmp_path, max_steps=steps, **folders)).state.step

    assert train(str(here), 2) == 2
    (s3_env.root / "elsewhere").mkdir()
    before = str(here)
    for steps, root in enumerate((f"{s3_env.uri}/one", "s3://elsewhere/two"), 3):
        copy(before, root)
        shutil.rmtree(before.replace("s3:/", str(s3_env.root)))
        begun = begin_download(root)
        assert (begun.index.rows, begun.pending()) == (42, [])
        assert finish(begun, input={"uri": f"{root}/metadata"}).digest == images.digest
        assert train(root, steps) == steps
        for folder in ("images", "latents", "run"):
            assert [section.problems for section in describe(open_storage(f"{root}/{folder}"))] == [[]]
        before = root
