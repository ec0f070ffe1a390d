"""The committed tiny model: that it is what the script makes, and that it does what the demo needs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scripts import make_tiny_models as script
from scripts.demo.shapes import sample
from sdp.model import latents, load
from sdp.model.family import SCALE
from sdp.model.layout import present
from sdp.model.sources import resolve

HELD_OUT = script.HELD_OUT


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve("builtin:tiny").path


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize(("size", "pictures", "at_least"), [(64, 100, 26.0), (256, 20, 26.0)])
def test_held_out_pictures_survive_the_vae(tiny: Path, size: int, pictures: int, at_least: float) -> None:
    with torch.no_grad():
        psnr, right = script.reconstruction(load.load_vae(tiny), size, pictures)
    assert psnr.mean() > at_least
    assert right >= 0.99


def test_scaled_latents_are_of_unit_size(tiny: Path) -> None:
    with torch.no_grad():
        encoded = torch.cat(list(script.encoded(load.load_vae(tiny), 64, 100)))
    assert encoded.std((0, 2, 3)).tolist() == pytest.approx([1] * 4, abs=0.12)
    assert encoded.mean((0, 2, 3)).tolist() == pytest.approx([0] * 4, abs=0.2)


def test_drawing_from_the_posterior_instead_of_its_mode_changes_little(tiny: Path) -> None:
    vae: Any = load.load_vae(tiny)
    pixels = latents.to_pixels(script.pictures(0, 20, 64, HELD_OUT))
    noise = torch.randn(20, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        drawn = latents.decode(vae, SCALE * (posterior.mean + posterior.std * noise))
        exact = latents.decode(vae, SCALE * posterior.mean)
    assert 10 * math.log10(4 / float((drawn - exact).square().mean())) > 25


def test_colour_background_and_shape_are_read_linearly_from_the_text_encoder(tiny: Path) -> None:
    with torch.no_grad():
        assert min(script.readable(tiny)) >= 0.99


def test_the_model_is_small_and_the_script_knows_every_file_of_it(tiny: Path) -> None:
    files = [path for path in tiny.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert sorted(str(path.relative_to(tiny)) for path in files) == present(tiny)


def test_what_is_not_trained_is_exactly_what_the_script_makes(tiny: Path, tmp_path: Path) -> None:
    for part in ("tokenizer", "unet", "scheduler"):
        (tmp_path / part).mkdir()
        getattr(script, f"make_{part}")(tmp_path)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (tiny / path.relative_to(tmp_path)).read_bytes(), path.name


def test_training_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for folder in (tmp_path / "once", tmp_path / "again"):
        for part in ("tokenizer", "text_encoder", "vae"):
            (folder / part).mkdir(parents=True)
        script.make_tokenizer(folder)
        script.make_text_encoder(folder, steps=3, batch=8)
        script.make_vae(folder, steps=3, batch=4)
    assert script.compare(tmp_path / "once", tmp_path / "again") == 0
    (tmp_path / "again" / "vae" / "config.json").write_text("{}")
    assert script.compare(tmp_path / "once", tmp_path / "again") == 1


def test_the_pipeline_of_diffusers_loads_it_as_a_stable_diffusion(tiny: Path) -> None:
    from diffusers import StableDiffusionPipeline

    kind: Any = StableDiffusionPipeline
    pipeline = kind.from_pretrained(tiny, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a red circle on a blue background", num_inference_steps=2, output_type="np").images[0]
    assert image.shape == (64, 64, 3)
    assert np.isfinite(image).all()


@pytest.mark.timeout(900)  # half a minute of arithmetic, if it is alone
def test_a_short_training_learns_to_heed_the_caption(tiny: Path) -> None:
    """After a short training, the noise is predicted better with the right caption than with another picture's."""
    torch.manual_seed(0)
    vae, encoder, tokenizer = load.load_vae(tiny), load.load_text_encoder(tiny), load.load_tokenizer(tiny)
    samples = [sample(i, seed=1) for i in range(512)]
    with torch.no_grad():
        images = script.pictures(0, 512, 64, seed=1)
        clean = torch.cat([script.latents_of(vae, part) for part in torch.split(images, 64)])
        tokens = torch.from_numpy(load.tokenize(tokenizer, [s.caption for s in samples]).astype(np.int64))
        text = encoder(tokens[:, :24]).last_hidden_state  # the rest of the 77 says the same
    unet: Any = load.load_unet(tiny, pretrained=False)
    alphas = load.load_noise_schedule(tiny).alphas_cumprod
    optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3)

    def loss(of: torch.Tensor, captions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(of.shape, generator=generator)
        steps = torch.randint(400, 1000, (len(of),), generator=generator)
        left = alphas[steps].view(-1, 1, 1, 1)
        return F.mse_loss(unet(left.sqrt() * of + (1 - left).sqrt() * noise, steps, captions).sample, noise)

    seeds = torch.Generator().manual_seed(1)
    for _ in range(120):
        chosen = torch.randint(0, 448, (32,), generator=seeds)
        optimizer.zero_grad()
        torch.autograd.backward(loss(clean[chosen], text[chosen], seeds))
        optimizer.step()
    with torch.no_grad():
        right = float(loss(clean[448:], text[448:], torch.Generator().manual_seed(2)))
        wrong = float(loss(clean[448:], text[448:].roll(1, 0), torch.Generator().manual_seed(2)))
    assert right < 0.9 * wrong
