"""From five pictures to a model that draws their subject, by one command."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from sdp.cli import main
from sdp.config import load
from sdp.config.dreambooth import DreamboothConfig
from sdp.datasets.manifest import open_dataset
from sdp.dreambooth import job
from sdp.errors import ConfigError, UserError
from sdp.model.checkpoints import find_checkpoint, read_ledger
from sdp.storage import open_storage
from tests.evaluate_kit import tiny_first_dino
from tests.process_kit import picture
from tests.tiny_model import make_tiny_model

CAPTION = "a photo of unqtkn cat"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dreambooth")
    make_tiny_model(root / "model", first=True)
    (root / "own").mkdir()
    for number in range(5):
        (root / f"own/{number}.jpg").write_bytes(picture(number))
    return root


def settings(root: Path, out: Path) -> list[str]:
    return [
        f"source.uri={root / 'own'}", f"source.caption={CAPTION}",
        f"model.source={root / 'model'}", f"output.uri={out}",
        "prior.prompt=a photo of a cat", "prior.pictures=6", "resolution=64", "max_steps=5", "precision=fp32",
        "lora.rank=2", "scaling.accelerator=cpu",
    ]  # fmt: skip


def config(root: Path, out: Path, *others: str) -> DreamboothConfig:
    return load("dreambooth", None, [*settings(root, out), *others])


def written(out: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in out.rglob("*.parquet")} | {
        str(path): path.stat().st_mtime for path in out.glob("run/checkpoints/*/complete.json")
    }


@pytest.mark.slow
def test_each_step_leaves_its_folder_and_is_not_taken_twice(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "cat"
    features = f"evaluate.features={tiny_first_dino(tmp_path / 'dino')}"
    whole = config(root, out, features)
    job.run(whole, dry_run=True)
    assert not out.exists()
    job.run(whole)
    counts = {
        name: open_dataset(open_storage(str(out / name))).manifest.counts.written
        for name in (job.OWN_LATENTS, "class", job.CLASS_LATENTS, job.PICTURES, "class-after")
    }
    assert counts == {
        job.OWN_LATENTS: 5, "class": 6, job.CLASS_LATENTS: 6, job.PICTURES: 4, "class-after": 6,
    }  # fmt: skip
    (drawn,) = (out / job.PICTURES / "parts").glob("*.parquet")
    assert pq.read_table(drawn)["prompt"].to_pylist() == [CAPTION] * 4
    checkpoint = find_checkpoint(str(out / job.RUN))
    # Five steps of two samples on one worker: six of the class and four of the subject, or one more and one fewer.
    assert read_ledger(checkpoint).consumed(0) == 10
    page = (out / job.PAGE).read_text()
    assert CAPTION in page
    assert "Pictures by prompt" in page
    measured = [json.loads((out / name / "evaluation.json").read_text()) for name in ("evaluation", "class-evaluation")]
    assert all(figures["fid"]["value"] > 0 for figures in measured)
    before = written(out)
    job.run(whole)
    assert written(out) == before


@pytest.mark.parametrize(("reason", "code"), [("SIGINT", 130), ("the node is preempted", 0)])
def test_a_step_that_is_stopped_ends_the_command_as_if_it_ran_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, code: int
) -> None:
    stopped = SimpleNamespace(reason=f"asked to stop: {reason}")
    monkeypatch.setattr("sdp.process.job.run", lambda _: None)
    monkeypatch.setattr("sdp.generate.job.run", lambda _: None)
    monkeypatch.setattr("sdp.train.job.run", lambda _: stopped)
    assert main(["dreambooth", *(f"--set={setting}" for setting in settings(root, tmp_path / "out"))]) == code


def test_half_of_the_samples_are_the_subjects(root: Path, tmp_path: Path) -> None:
    def train(*others: str) -> Any:
        (step,) = (s for s in job.steps_of(config(root, tmp_path, *others)) if s.job == "train")
        return step.config

    (own,) = train().source.also
    assert (own.weight, own.uri) == (1.0, f"{tmp_path}/{job.OWN_LATENTS}")
    alone = train("prior.prompt=null").source
    assert (alone.uri, alone.also) == (f"{tmp_path}/{job.OWN_LATENTS}", ())
    assert train().optimizer.learning_rate == 1e-4
    assert train("lora.rank=null").optimizer.learning_rate == 5e-6


def test_with_features_the_class_is_drawn_again_and_compared_with_its_first_pictures(
    root: Path, tmp_path: Path
) -> None:
    features = f"evaluate.features={tiny_first_dino(tmp_path / 'dino')}"
    redraw, drift = job.steps_of(config(root, tmp_path, features))[-2:]
    assert (redraw.config.prompts, redraw.config.images_per_prompt) == (("a photo of a cat",), 6)
    assert redraw.config.checkpoint == f"{tmp_path}/{job.RUN}"
    assert drift.config.source.uri == redraw.config.output.uri == f"{tmp_path}/class-after"
    assert drift.config.reference.uri == f"{tmp_path}/class"
    without = [step.config.output.uri for step in job.steps_of(config(root, tmp_path, features, "prior.prompt=null"))]
    assert without[-1] == f"{tmp_path}/evaluation"


def test_an_impossible_configuration_is_one_line_before_any_step(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    other = shutil.copytree(root / "model", tmp_path / "inpainting")
    unet = json.loads((other / "unet/config.json").read_text())
    (other / "unet/config.json").write_text(json.dumps({**unet, "in_channels": 9}))
    for others, line in (
        ([f"source.uri={tmp_path / 'empty'}"], r"no folder with .* files"),
        (["source.caption=a photo of a cat"], r"^--set source.caption: expected a word that is not in prior.prompt"),
        (["lora.rank=40"], r"^lora.rank: expected at most 16"),
        ([f"model.source={tmp_path / 'empty'}"], r"^model source .*: "),
        (
            [f"model.source={other}"],
            r"^model source .*/inpainting: .*latent_channels: expected 9, as the unet needs, got 4",
        ),
    ):
        with pytest.raises((UserError, ConfigError), match=line):
            job.run(config(root, out, *others))
        assert not out.exists(), others
