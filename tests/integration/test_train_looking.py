"""Measures of the model's quality during training: the loss on held-out rows, and pictures."""

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from PIL import Image

from sdp.datasets.draws import held_out
from sdp.datasets.ledger import Ledger
from sdp.errors import DatasetError
from sdp.generate import job as generate
from sdp.model.sources import resolve
from sdp.report.page import Gallery
from sdp.report.sections import gather
from sdp.storage import open_storage
from sdp.train import job
from sdp.train.assemble import make_conditioning
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.samples import DrawSamples
from sdp.train.callbacks.validation import MeasureValidationLoss
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.run_folder import RunFolder
from sdp.train.world import World
from tests.generate_kit import generate_config, tiny_model
from tests.latents import latent_of, make_latents, tokens_of
from tests.training import Gauges, config, train, weights
from tests.waiting import until
from tests.workers import run_workers

pytestmark = pytest.mark.usefixtures("one_thread")

HOLDOUT = {"data__holdout": 0.25, "evaluate__every_steps": 2}
PROMPTS = ["a red circle", "b", "z"]
SAMPLES = {"samples__every_steps": 3, "samples__prompts": PROMPTS, "samples__steps": 2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and 60 rows of latents."""
    root = tmp_path_factory.mktemp("train")
    tiny_model(root / "model")
    make_latents(root, 60, unit_rows=20, group_rows=5, vocabulary=50)
    return root


def unseen() -> "np.ndarray[Any, np.dtype[np.int64]]":
    rows = np.arange(60)
    return rows[held_out(rows, 0.25)]


def by_hand(root: Path, unet: torch.nn.Module, rows: list[int], buckets: int = 10) -> list[float]:
    """Return the losses with diffusers' schedule and the test's own rows, without reader or batches."""
    model = resolve(str(root / "model"))
    conditioning = make_conditioning(config(root), model, World())
    assert conditioning.encode is not None
    scheduler = DDPMScheduler.from_pretrained(model.path / "scheduler")
    latents = torch.stack([torch.from_numpy(latent_of(row, 8)) for row in rows]).float()
    tokens = torch.stack([torch.from_numpy(tokens_of(row, 50).astype(np.int64)) for row in rows])
    losses = []
    with torch.no_grad():
        text = conditioning.encode(tokens)
        for number in range(buckets):
            random = RowRandom(0x5D9, torch.full((len(rows),), number), torch.tensor(rows))
            width = 1000 // buckets
            timesteps = number * width + random.integers(Purpose.TIMESTEP, width)
            noise = random.normal(Purpose.NOISE, 4, 8, 8)
            predicted = unet(scheduler.add_noise(latents, noise, timesteps), timesteps, text).sample
            losses.append(F.mse_loss(predicted, noise).item())
    return losses


def test_the_loss_on_unseen_rows_is_that_of_diffusers_and_they_stay_unseen(root: Path) -> None:
    how = config(root, max_steps=4, **HOLDOUT)
    gauges = Gauges()
    trainer = train(how, callbacks=[MeasureValidationLoss(how), gauges])
    assert list(gauges.by_step) == [2, 4]
    names = [f"{start}-{start + 99}" for start in range(0, 1000, 100)]
    last = gauges.by_step[4]
    assert list(last) == [*names, "all"]
    expected = by_hand(root, trainer.networks.unet, unseen().tolist())
    assert [last[name] for name in names] == pytest.approx(expected, abs=1e-5)
    assert last["all"] == pytest.approx(np.mean(expected), abs=1e-5)
    ledger = Ledger.from_bytes((root / "run/checkpoints/step-000000004/ledger.roaring").read_bytes())
    assert not set(unseen().tolist()) & set(ledger.rows(0))


def test_measuring_and_drawing_change_nothing_about_training(root: Path) -> None:
    plain = weights(train(config(root, "plain", max_steps=4, data__holdout=0.25)))
    how = config(root, "measured", max_steps=4, **HOLDOUT, **SAMPLES)
    measured = weights(train(how, callbacks=[MeasureValidationLoss(how), DrawSamples(how)]))
    assert plain.keys() == measured.keys()
    assert all(torch.equal(measured[name], tensor) for name, tensor in plain.items())


def test_another_dataset_is_measured_on_whole(root: Path, tmp_path: Path) -> None:
    other = make_latents(tmp_path / "other", 11, unit_rows=4, group_rows=4, vocabulary=50)
    how = config(root, max_steps=2, evaluate__every_steps=2, evaluate__source=other.storage.uri)
    measure, gauges = MeasureValidationLoss(how), Gauges()
    trainer = train(how, callbacks=[measure, gauges])
    assert measure._batch is not None
    assert sorted(measure._batch.counted.tolist()) == list(range(11))
    expected = by_hand(root, trainer.networks.unet, list(range(11)), buckets=10)
    assert gauges.by_step[2]["all"] == pytest.approx(np.mean(expected), abs=1e-5)


def worker(world: World, root: Path, run: str, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    """Train a run to its end; return its tensors and its measurements."""
    gauges, how = Gauges(), config(root, run, **changes)
    callbacks = [MeasureValidationLoss(how), gauges, DrawSamples(how), SaveCheckpoints(2)]
    trainer = train(how, world, callbacks)
    return {name: tensor.numpy() for name, tensor in weights(trainer).items()}, gauges.by_step


def test_several_workers_measure_and_draw_what_one_does(root: Path) -> None:
    changes = {**HOLDOUT, **SAMPLES, "evaluate__rows": 9, "data__global_batch_size": 8, "max_steps": 4}
    tensors, alone = worker(World(), root, "alone", changes)
    several = run_workers(2, worker, root, "several", {**changes, "data__batch_size": 4, "strategy__kind": "fsdp"})
    assert [validation.keys() for _, validation in several] == [alone.keys()] * 2
    for their_tensors, validation in several:
        for step, losses in alone.items():
            assert validation[step] == pytest.approx(losses, abs=2e-5)
        for name, tensor in tensors.items():
            tolerance = 2e-6 if name.startswith("exp_avg") else 5e-4
            assert np.allclose(their_tensors[name], tensor, atol=tolerance), name
    for run in ("alone", "several"):
        names = sorted(path.name for path in (root / run / "samples/step-000000003").iterdir())
        assert names == ["000.png", "001.png", "002.png", "prompts.json"]
    for number in range(3):
        single, parallel = (
            opened(root / run / f"samples/step-000000003/{number:03d}.png") for run in ("alone", "several")
        )
        assert np.abs(single.astype(int) - parallel.astype(int)).max() <= 1


def opened(path: Path) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        return np.asarray(picture)


@pytest.mark.parametrize("lora", [None, 4])
def test_samples_are_what_sdp_generate_draws_with_the_checkpoint_of_their_step(root: Path, lora: int | None) -> None:
    small = {"lora__rank": lora, "model__denoiser": "pretrained", "optimizer__learning_rate": 0.01} if lora else {}
    how = config(root, max_steps=8, **SAMPLES, **small)
    drawn = DrawSamples(how)
    trainer = train(how, callbacks=[SaveCheckpoints(3), drawn])
    assert drawn._trained is not None
    own = dict(trainer.networks.named_parameters())
    shared = [n for n, p in drawn._trained.named_parameters() if p.data_ptr() == own[n].data_ptr()]
    assert bool(shared) == bool(lora)
    assert not any("lora" in name for name in shared)
    settings = {"steps": 2, "guidance_scale": 7.5}
    for step in (3, 6):
        checkpoint = f"{root}/run/checkpoints/step-{step:09d}"
        generate.run(generate_config(root / f"out{step}", checkpoint, PROMPTS, sampler=settings))
        folder = root / f"run/samples/step-{step:09d}"
        assert json.loads((folder / "prompts.json").read_text()) == {f"{n:03d}.png": p for n, p in enumerate(PROMPTS)}
        for number in range(len(PROMPTS)):
            actual = opened(folder / f"{number:03d}.png").astype(int)
            expected = opened(root / f"out{step}/images/{number:09d}.png").astype(int)
            assert np.abs(actual - expected).max() <= 1, (step, number)  # decoded one by one there, here together
            assert actual.std() > 10
    events = [event for event in trainer.checkpointer.run.events() if event["event"] == "samples"]
    assert [event["step"] for event in events] == [3, 6]
    assert all(event["seconds"] > 0 for event in events)


def test_training_continues_if_pictures_cannot_be_written(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "run").mkdir()
    (root / "run" / "samples").write_bytes(b"in the way")
    how = config(root, max_steps=4, **SAMPLES)
    trainer = train(how, callbacks=[DrawSamples(how)])
    assert trainer.state.step == 4
    assert "step 3: gave up the samples: " in caplog.text


def test_the_job_measures_draws_and_reports_both(root: Path) -> None:
    changes = {**HOLDOUT, **SAMPLES, "max_steps": 6, "log__every_steps": 2, "checkpoint__every_steps": 6}
    job.run(config(root, **changes))
    lines = RunFolder(open_storage(str(root / "run"))).metrics()
    assert [line["validation_step"] for line in lines] == [2, 4, 6]
    (section,) = [section for section in gather([str(root / "run")]) if section.title == "Training"]
    (pictures,) = [block for block in section.blocks if isinstance(block, Gallery) and block.rows]
    assert all({"step 3", "step 6"} <= {tile.note for tile in tiles} for _, tiles in pictures.rows)


@pytest.mark.slow
def test_a_run_is_watched_in_a_browser_until_its_end_and_ctrl_c_ends_the_page(root: Path) -> None:
    changes = {**HOLDOUT, **SAMPLES, "max_steps": 30, "log__every_steps": 2, "checkpoint__every_steps": 3}
    file = root / "train.yaml"
    file.write_text(json.dumps(config(root, **changes).model_dump(mode="json")))
    sdp, pages = [sys.executable, "-m", "sdp"], list[str]()
    with subprocess.Popen([*sdp, "train", "--config", file], stderr=subprocess.PIPE, text=True) as training:
        assert training.stderr is not None
        until(lambda: "--watch" in training.stderr.readline(), "the command is printed")
        watching = [*sdp, "report", root / "run", "--watch", "--port", "0"]
        with subprocess.Popen(watching, stderr=subprocess.PIPE, text=True) as page:
            assert page.stderr is not None
            link = page.stderr.readline().split()[2]

            def finished() -> bool:
                with urlopen(link) as answer:
                    pages.append(answer.read().decode())
                return "Finished: 30 of 30 steps" in pages[-1]

            until(finished, "the run's end", every_s=0.5)
            picture = re.findall(r'src="(samples[^"]*)"', pages[-1])[0]
            with urlopen(link + picture) as answer, Image.open(answer) as opened:
                assert opened.format == "PNG"
            page.send_signal(signal.SIGINT)
            assert page.wait(20) == 130
            assert "sdp: stopped by SIGINT" in page.stderr.read()
        training.stderr.read()
    newest = [re.findall(r'src="samples/step-0*(\d+)', page)[:1] for page in pages]
    assert len({*map(tuple, newest)}) > 1, "it grows"
    assert picture.startswith("samples/step-000000030/")
    assert "not ended; under way" in pages[0]
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", pages[-1]))
    assert {"loss", "loss on held-out rows", "img/s"} <= figures.keys()


def test_a_dataset_to_measure_on_that_is_not_there_is_told_before_anything_begins(root: Path) -> None:
    how = config(root, evaluate__every_steps=2, evaluate__source=str(root / "nowhere"))
    with pytest.raises(DatasetError, match=r"nowhere: not a dataset of sdp"):
        job.run(how)
    assert not (root / "run").exists()


def test_rows_of_which_none_is_kept_are_refused(root: Path) -> None:
    how = config(root, evaluate__every_steps=2, data__holdout=1e-9)
    with pytest.raises(DatasetError, match=r"no rows are held out from training; raise data\.holdout"):
        train(how, callbacks=[MeasureValidationLoss(how)])
