"""Sampling, against diffusers' own pipeline with the same weights and the same seeds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray

from sdp.config.generate import SamplerConfig
from sdp.device import BatchLimit
from sdp.errors import OutOfMemory
from sdp.generate.painter import Painter, load_painter
from sdp.generate.sample import SCHEDULERS, image_seed, make_scheduler
from sdp.generate.source import GenerateModel
from sdp.model.load import load_scheduler_config
from sdp.model.sources import resolve
from tests.generate_kit import generate_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS, SEEDS, NEGATIVE = ["a red circle", "z"], [11, 2**62 + 5], "blurry"
HOW = SamplerConfig(steps=4, guidance_scale=5.0, negative_prompt=NEGATIVE)

Pictures = NDArray[np.uint8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def painter(model: Path) -> Painter:
    resolved = resolve(str(model))
    config = generate_config(Path("out"), model, sampler=HOW.model_dump())
    return load_painter(GenerateModel(str(model), resolved.digest, resolved.source), config)


@pytest.fixture(scope="module")
def diffusers_pipeline(model: Path) -> Any:
    pipeline: Any = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def painted(painter: Painter, first: int = 0) -> Pictures:
    pictures = painter.paint(PROMPTS[first:], SEEDS[first:])
    return np.stack([picture for picture in pictures if picture is not None])


def apart(a: Pictures, b: Pictures) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@pytest.mark.parametrize(
    ("name", "guidance", "prediction"),
    [*((name, 5.0, "epsilon") for name in SCHEDULERS), ("ddim", 1.0, "epsilon"), ("ddim", 5.0, "v_prediction")],
)
def test_pictures_are_those_of_diffusers_pipeline(
    name: str, guidance: float, prediction: str, model: Path, painter: Painter, diffusers_pipeline: Any
) -> None:
    kind, settings = SCHEDULERS[name]
    config = json.loads((model / "scheduler" / "scheduler_config.json").read_text())
    config["prediction_type"] = prediction
    diffusers_pipeline.scheduler = getattr(diffusers, kind).from_config({**config, **settings})
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    output = diffusers_pipeline(
        PROMPTS,
        negative_prompt=[NEGATIVE] * 2,
        num_inference_steps=4,
        guidance_scale=guidance,
        height=64,
        width=64,
        generator=generators,
        output_type="np",
    )
    golden = (output.images * 255).round().astype(np.uint8)
    how = HOW.replaced(scheduler=name, guidance_scale=guidance)
    actual = painted(replace(painter, sampler=how, schedule=config))
    assert actual.shape == golden.shape == (2, 64, 64, 3)
    assert golden.std() > 5, "a grey picture would prove nothing"
    assert apart(golden[0], golden[1]) > 5
    assert apart(actual, golden) <= 1


@pytest.mark.parametrize("name", ["ddim", "euler_a"])
def test_a_picture_does_not_depend_on_its_batch(name: str, painter: Painter) -> None:
    mine = replace(painter, sampler=HOW.replaced(scheduler=name))
    assert apart(painted(mine)[1], painted(mine, first=1)[0]) <= 1


def test_a_picture_with_non_finite_values_is_none_and_the_others_are_unaffected(painter: Painter) -> None:
    def encode(prompts: Sequence[str]) -> torch.Tensor:
        states = painter.encode(prompts)
        states[[number for number, prompt in enumerate(prompts) if prompt == "bad"]] = torch.nan
        return states

    good, bad = replace(painter, encode=encode).paint([PROMPTS[0], "bad"], SEEDS)
    assert bad is None
    assert good is not None
    assert apart(good, painted(painter)[0]) <= 1


class Crowded:
    """A U-Net with memory for so many."""

    def __init__(self, unet: Any, room: int) -> None:
        self.unet, self.room, self.calls = unet, room, 0

    def __call__(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if len(latents) > self.room:
            raise RuntimeError("FIND was unable to find an engine to execute this computation")  # cuDNN's form
        return self.unet(latents, *args, **kwargs)


def test_a_batch_too_large_for_memory_is_halved_and_a_single_one_is_an_error(painter: Painter) -> None:
    crowded = Crowded(painter.denoiser, room=4)  # two pictures, guided
    mine = replace(painter, denoiser=crowded, limit=BatchLimit(8))
    pictures = mine.paint(PROMPTS * 3, SEEDS * 3)
    assert mine.limit.size == 2
    assert len(pictures) == 6
    assert all(picture is not None for picture in pictures)
    crowded.room = 1
    with pytest.raises(OutOfMemory, match=r"^resolution: no memory for a single picture of 64 pixels"):
        mine.paint(PROMPTS, SEEDS)


def test_seeds_are_fixed_by_seed_and_address_for_ever() -> None:
    seeds = {image_seed(seed, row) for seed in range(20) for row in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [image_seed(0, 0), image_seed(0, 1), image_seed(7, 123_456_789_012)] == GOLDEN_SEEDS


GOLDEN_SEEDS = [4334430513956379144, 2440950710608614359, 5320785019570199574]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_without_signal_at_its_end_is_begun_at_its_end(name: str, model: Path) -> None:
    config = load_scheduler_config(model) | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    scheduler = make_scheduler(config, name)
    scheduler.set_timesteps(5)
    assert scheduler.timesteps[0] == 999
    assert float(scheduler.alphas_cumprod[-1]) < 1e-7
