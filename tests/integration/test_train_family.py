"""Stable Diffusion 1 in every stage: images, training, export, pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from sdp.model.export import export
from tests.flow_kit import painted
from tests.generate_kit import generate_config
from tests.process_kit import make_images
from tests.tiny_model import make_tiny_model
from tests.training import config, train, weights


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the export of a run of three steps on images."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("family")
    make_tiny_model(root / "model", first=True)
    make_images(root, 40, unit_rows=20)
    how = config(
        root, source__uri=str(root / "images"), data__mode="collocated", data__readers=2, encode__dtype="fp32",
        model__denoiser="pretrained", max_steps=3,
    )  # fmt: skip
    trained = weights(train(how))
    export(str(root / "run"), str(root / "out"))
    return root / "out", trained


def test_diffusers_loads_the_export_of_a_model_that_names_a_safety_checker(
    exported: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, trained = exported
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    assert pipeline.safety_checker is None
    for name, tensor in pipeline.unet.state_dict().items():
        assert torch.equal(tensor, trained[f"ema.{name}"]), name


def test_its_pictures_are_those_of_diffusers(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = exported
    how = generate_config(folder / "out", folder, sampler={"guidance_scale": 5.0})
    (actual,) = painted(how, ["a cat"], [7])
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, clip_sample=False)
    expected = pipeline(
        "a cat", num_inference_steps=3, guidance_scale=5.0, height=64, width=64, output_type="np",
        generator=torch.Generator().manual_seed(7),
    ).images[0]  # fmt: skip
    assert np.abs(actual - np.round(expected * 255).astype(int)).max() <= 1
