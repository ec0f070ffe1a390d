"""One forward pass of training: from a batch to the loss of each sample.

Everything random is drawn from (seed, phase, epoch, row), so a sample's loss does not depend on which worker
computes it, in which batch it comes, or how often the job was restarted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sdp.model.loss import min_snr_weights, sample_losses
from sdp.model.schedule import NoiseSchedule, Prediction
from sdp.train.data.batch import Batch
from sdp.train.randomness import Purpose, RowRandom


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the model learns."""

    schedule: NoiseSchedule
    prediction: Prediction = "epsilon"
    caption_dropout: float = 0.1
    """How often a caption is replaced by the empty one, drawn anew in each epoch."""
    min_snr_gamma: float | None = None
    """Cap on the signal-to-noise ratio that a timestep counts for."""
    offset_noise: float = 0.0
    """Strength of noise that is the same over a whole channel."""


@dataclass(frozen=True)
class Conditioning:
    """From a batch's text to what the networks are called with."""

    empty: Tensor
    """The encoded empty string, (77, width)."""
    encode: Callable[[Tensor], Tensor] | None = None
    """The frozen text encoder, from token ids; not needed where batches hold its output. Of a text encoder that is
    trained, which encodes within the forward pass, token ids themselves: then `empty` is (77,)."""

    @torch.no_grad()
    def states(self, batch: Batch, dropped: Tensor) -> Tensor:
        """The text of each sample, or the empty string where it is dropped."""
        if batch.text is not None:
            encoded = batch.text.to(self.empty.dtype)
        elif batch.token_ids is not None and self.encode is not None:
            with torch.autocast(batch.token_ids.device.type, enabled=False):  # as `empty` was encoded
                encoded = self.encode(batch.token_ids.to(torch.int64))
        else:
            raise ValueError("a batch with token ids needs a text encoder")
        empty = self.empty.to(encoded.dtype)
        # Weightless rows too: what fills up a batch must not be able to bring NaN into the gradients.
        left_out = (dropped | (batch.weights == 0)).view(-1, *[1] * empty.dim())
        return torch.where(left_out, empty, encoded)


def drawn(moments: Tensor, random: RowRandom) -> Tensor:
    """Latents out of the VAE's mean and log-variance (both of the scaled latent), anew in each epoch."""
    mean, log_variance = moments.chunk(2, dim=1)
    return mean + (log_variance.clamp(-30, 20) / 2).exp() * random.normal(Purpose.VAE, *mean.shape[1:])


def weighted_losses(
    networks: nn.Module, objective: Objective, conditioning: Conditioning, batch: Batch, random: RowRandom
) -> Tensor:
    """The loss of each sample times its weight; the caller divides their sum by the sum of all weights."""
    schedule = objective.schedule
    timesteps = random.integers(Purpose.TIMESTEP, len(schedule))
    text = conditioning.states(batch, random.chance(Purpose.CAPTION_DROPOUT, objective.caption_dropout))
    losses = losses_at(networks, objective, batch, random, timesteps, text)
    weights = batch.weights
    if objective.min_snr_gamma is not None:
        weights = weights * min_snr_weights(schedule, timesteps, objective.prediction, objective.min_snr_gamma)
    return losses * weights


def losses_at(
    networks: nn.Module, objective: Objective, batch: Batch, random: RowRandom, timesteps: Tensor, text: Tensor
) -> Tensor:
    """The loss of each sample at a timestep, unweighted."""
    schedule = objective.schedule
    latents = torch.where(batch.weights[:, None, None, None] > 0, batch.latents.float(), 0.0)
    if batch.moments:
        latents = drawn(latents, random)
    shape = latents.shape[1:]
    noise = random.normal(Purpose.NOISE, *shape)
    if objective.offset_noise:
        noise = noise + objective.offset_noise * random.normal(Purpose.OFFSET_NOISE, shape[0], 1, 1)
    predicted = networks(schedule.add_noise(latents, noise, timesteps), timesteps, text)
    return sample_losses(predicted, schedule.target(objective.prediction, latents, noise, timesteps))
