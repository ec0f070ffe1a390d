"""One forward pass of training: from a batch to the loss of each sample.

Everything random is drawn from (seed, phase, epoch, row), so a sample's loss does not depend on the worker, the batch
or the number of restarts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sdp.config.train import ObjectiveConfig
from sdp.model.schedule import NoiseSchedule, Prediction, min_snr_weights, sample_losses
from sdp.train.data.batch import Batch
from sdp.train.randomness import Purpose, RowRandom


@dataclass(frozen=True)
class Objective:
    """The training objective."""

    schedule: NoiseSchedule
    prediction: Prediction
    """The prediction of the settings, resolved when the run began."""
    settings: ObjectiveConfig


@dataclass(frozen=True)
class Conditioning:
    """The text input of the networks: embeddings, or token ids if the text encoder is trained with the U-Net."""

    empty: Tensor
    """The empty caption: its embedding, (77, width), or its token ids, (77,)."""
    encode: Callable[[Tensor], Tensor] | None = None
    """Encodes token ids; the identity if the text encoder is trained. Not needed if batches have embeddings."""

    @torch.no_grad()
    def text_or_empty(self, batch: Batch, dropped: Tensor) -> Tensor:
        """Return the text of each sample, or the empty caption where it is dropped."""
        if batch.text is not None:
            encoded = batch.text.to(self.empty.dtype)
        elif batch.token_ids is not None and self.encode is not None:
            with torch.autocast(batch.token_ids.device.type, enabled=False):  # as `empty` was encoded
                encoded = self.encode(batch.token_ids.to(torch.int64))
        else:
            raise ValueError("a batch with token ids needs a text encoder")
        empty = self.empty.to(encoded.dtype)
        # Rows of weight 0 too, so that padding cannot bring NaN into the gradients.
        left_out = (dropped | (batch.weights == 0)).view(-1, *[1] * empty.dim())
        return torch.where(left_out, empty, encoded)


def sample_latents(moments: Tensor, random: RowRandom) -> Tensor:
    """Draw latents from the VAE's mean and log-variance (both of the scaled latent)."""
    mean, log_variance = moments.chunk(2, dim=1)
    return mean + (log_variance.clamp(-30, 20) / 2).exp() * random.normal(Purpose.VAE, *mean.shape[1:])


def weighted_losses(
    networks: nn.Module, objective: Objective, conditioning: Conditioning, batch: Batch, random: RowRandom
) -> Tensor:
    """Return the loss of each sample times its weight; the caller divides by the sum of all weights."""
    schedule = objective.schedule
    timesteps = random.integers(Purpose.TIMESTEP, len(schedule))
    text = conditioning.text_or_empty(batch, random.chance(Purpose.CAPTION_DROPOUT, objective.settings.caption_dropout))
    losses = losses_at(networks, objective, batch, random, timesteps, text)
    weights = batch.weights
    if objective.settings.min_snr_gamma is not None:
        weights = weights * min_snr_weights(schedule, timesteps, objective.prediction, objective.settings.min_snr_gamma)
    return losses * weights


def losses_at(
    networks: nn.Module, objective: Objective, batch: Batch, random: RowRandom, timesteps: Tensor, text: Tensor
) -> Tensor:
    """Return the unweighted loss of each sample at its timestep."""
    schedule = objective.schedule
    latents = torch.where(batch.weights[:, None, None, None] > 0, batch.latents.float(), 0.0)
    if batch.moments:
        latents = sample_latents(latents, random)
    shape = latents.shape[1:]
    noise = random.normal(Purpose.NOISE, *shape)
    if objective.settings.offset_noise:
        noise = noise + objective.settings.offset_noise * random.normal(Purpose.OFFSET_NOISE, shape[0], 1, 1)
    predicted = networks(schedule.add_noise(latents, noise, timesteps), timesteps, text)
    return sample_losses(predicted, schedule.target(objective.prediction, latents, noise, timesteps))
