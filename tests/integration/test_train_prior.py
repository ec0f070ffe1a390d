"""Prior preservation as a mixture: a step's gradient is that of the original's loss of pairs."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from sdp.model import load
from sdp.train.assemble import assemble
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.settle import settled
from sdp.train.world import World
from tests.latents import latent_of, make_latents, split_address, tokens_of
from tests.training import config, weights


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_gradient_of_a_mixed_step_is_that_of_the_subjects_loss_plus_the_weighted_loss_of_the_class(
    root: Path, tmp_path: Path, weight: float
) -> None:
    """The original loss is mse(subject) + weight * mse(class), means over each half; sdp's is divided by 1 + weight."""
    (tmp_path / "own").mkdir()
    make_latents(tmp_path / "own", 5, vocabulary=50)
    parsed = config(
        root,
        source__also=[{"uri": str(tmp_path / "own/latents"), "weight": 1 / weight}],
        model__denoiser="pretrained",
        data__batch_size=12,
        max_steps=1,
        optimizer__warmup_steps=0,
        objective__caption_dropout=0.0,
    )
    trainer = assemble(*settled(parsed), World())
    batch = next(trainer.reader.batches(0, 0, 12, trainer.state.start))
    trainer.train()

    unet, encoder = load.load_denoiser(root / "model", pretrained=True), load.load_text_encoder(root / "model")
    addresses = [split_address(row) for row in batch.rows.tolist()]
    latents = torch.stack([torch.from_numpy(latent_of(row, 8)) for _, row in addresses]).float()
    ids = torch.stack([torch.from_numpy(tokens_of(row, 50).astype("int64")) for _, row in addresses])
    epochs = torch.zeros_like(batch.rows) if batch.epochs is None else batch.epochs
    random = RowRandom(0, epochs, batch.rows)  # five pictures go round
    noise, timesteps = random.normal(Purpose.NOISE, 4, 8, 8), random.integers(Purpose.TIMESTEP, 1000)
    noisy = DDPMScheduler.from_pretrained(root / "model/scheduler").add_noise(latents, noise, timesteps)
    predicted = unet(noisy, timesteps, encoder(ids).last_hidden_state).sample
    own = torch.tensor([dataset == 1 for dataset, _ in addresses])
    assert int(own.sum()) == round(12 / (1 + weight))
    loss = F.mse_loss(predicted[own], noise[own]) + weight * F.mse_loss(predicted[~own], noise[~own])
    (loss / (1 + weight)).backward()
    result = weights(trainer)
    for name, parameter in unet.named_parameters():
        assert torch.allclose(result[f"exp_avg.{name}"], 0.1 * parameter.grad, atol=2e-6), name
